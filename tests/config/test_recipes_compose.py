"""Every recipe composes, alone and with others, into a configuration that can be planned."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_longctx.config import Config, RopeScaling, data_parallel_size, mode_options
from megatron_longctx.core.kernels.interface import PROVIDERS
from megatron_longctx.core.plans import build_plan
from megatron_longctx.training import compose
from megatron_longctx.training.compose import compose_config, override_config
from tests.config.test_settings_refused import refusal

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
GROUPS = {folder.name: sorted(p.stem for p in folder.glob("*.yaml")) for folder in RECIPES.iterdir() if folder.is_dir()}


def ready(config: Config) -> int:
    """Return the smallest number of ranks for `config` after checking that its plan can be built."""
    par = config.parallelism
    schedule = "zigzag" if par.schedule == "auto" else par.schedule
    world = par.model_parallel_size
    assert data_parallel_size(config, world) == 1
    plan = build_plan(schedule, par.context_parallel_size, config.data.seq_length, mode_options(par))
    assert plan.n == par.context_parallel_size
    return world


def test_every_model_every_parallelism_and_every_recompute() -> None:
    models, parallelisms, recomputes = (GROUPS[name] for name in ("model", "parallelism", "recompute"))
    anywhere = [name for name in parallelisms if "tp" not in name]  # not all have heads for tensor parallelism
    pairs = [(model, anywhere[i % len(anywhere)]) for i, model in enumerate(models)]
    for i, (model, parallelism) in enumerate([*pairs, *(("llama3_8b", name) for name in parallelisms)]):
        recompute = recomputes[i % len(recomputes)]
        hybrid = "pattern:" in (RECIPES / "model" / f"{model}.yaml").read_text()
        schedule = ["parallelism.schedule=helper"] * hybrid  # zigzag, as recipes of parallelism say, is refused
        config = compose_config([f"model={model}", f"parallelism={parallelism}", f"recompute={recompute}", *schedule])
        assert (config.model.name, config.recompute.mode) == (model, recompute)
        named = {"single": 1, "cp2": 2, "cp4": 4, "cp8": 8, "tp2_cp4": 8}
        assert ready(config) == named.get(parallelism, config.parallelism.model_parallel_size)


def test_every_reduction_matches_its_name() -> None:
    for name in GROUPS["reduction"]:
        found = compose_config([f"reduction={name}"]).reduction
        output, down = ("int4", "int8") if name == "int4_down8" else (name, name)
        assert (found.output_projection, found.down_projection, found.in_training) == (output, down, False)


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_every_experiment_on_its_own(experiment: str) -> None:
    config = compose_config([f"experiment={experiment}"])
    assert config.run.name == experiment, "two experiments must not share a run folder"
    assert ready(config) >= 1


def test_shapes_of_the_published_models() -> None:
    shapes = {
        "llama3_8b": (32, 4096, 32, 8, 14336, 128256, 500_000.0),
        "llama3_1_8b": (32, 4096, 32, 8, 14336, 128256, 500_000.0),
        "llama3_70b": (80, 8192, 64, 8, 28672, 128256, 500_000.0),
        "llama_7b": (32, 4096, 32, 32, 11008, 32000, 10_000.0),
        "llama_gqa": (32, 4096, 32, 8, 11008, 32000, 10_000.0),
        "llama_33h": (32, 4224, 33, 33, 11008, 32000, 10_000.0),
        **{f"llama_{h}h": (1024 // h, 128 * h, h, h, 11008, 32000, 10_000.0) for h in (16, 8, 4, 2)},
        "gpt2": (12, 768, 12, 12, 3072, 50304, 500_000.0),
    }
    for name, shape in shapes.items():
        m = compose_config([f"model={name}"]).model
        found = (m.num_layers, m.hidden_size, m.num_attention_heads, m.num_kv_heads, m.ffn_hidden_size)
        assert (*found, m.vocab_size, m.rope_base) == shape
        llama = name.startswith("llama")
        assert m.rope_scaling == (RopeScaling("llama3", 8.0, 8192) if name == "llama3_1_8b" else RopeScaling())
        assert (m.normalization, m.activation) == (("rmsnorm", "swiglu") if llama else ("layernorm", "gelu"))
        assert (m.position_embedding, m.bias, m.tie_embeddings) == (
            ("rope", False, False) if llama else ("learned", True, True)
        )


def test_without_overrides_the_defaults_apply() -> None:
    config = compose_config([])
    assert config.model == compose_config(["model=tiny"]).model
    assert replace(config, model=Config().model) == Config()


def test_the_command_line_wins_over_the_experiment() -> None:
    overrides = ["parallelism=cp2", "train.steps=7", "experiment=demo", "model=gpt2", "optim.warmup_steps=3"]
    for order in (overrides, overrides[::-1]):
        config = compose_config(order)
        assert config.parallelism.context_parallel_size == 2 and config.model.name == "gpt2"
        assert (config.train.steps, config.optim.warmup_steps) == (7, 3)
        assert (config.train.global_batch_size, config.optim.lr) == (2, 3e-3), "the experiment's own values stay"


def test_a_key_wins_over_its_group() -> None:
    for order in (1, -1):
        words = ["parallelism=cp4", "parallelism.schedule=ring", "parallelism.context_parallel_size=3"][::order]
        par = compose_config(words).parallelism
        assert (par.schedule, par.context_parallel_size) == ("ring", 3)


def test_the_later_of_two_equal_keys_wins() -> None:
    assert compose_config(["train.steps=11", "train.steps=12"]).train.steps == 12


@pytest.mark.parametrize("kernel", ("auto", *PROVIDERS))
def test_every_kernel_is_accepted_whether_it_is_installed_or_not(kernel: str) -> None:
    assert compose_config([f"attention.kernel={kernel}"]).attention.kernel == kernel


TEXTS = (
    *("a b", " a", "a=b", "a,b", "{a: 1}", "[x]", "it's", "'", '"', "'a", "back\\slash\\", "\\'", "\\\\'"),
    *("3", "1e3", "true", "null", "naïve-1.5", "#1", "::", "::1", "a: b", "'in quotes'", "'a, b'", '"a, b"'),
)


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_not_parsed_but_quotes_around_it_are_removed(text: str) -> None:
    expected = text[1:-1] if len(text) > 2 and text[0] in "'\"" and text[-1] == text[0] else text
    assert compose_config([f"run.name={text}"]).run.name == expected
    assert override_config(Config(), [f"run.name={text}"]).run.name == expected


def test_null_is_text_if_a_key_cannot_be_null() -> None:
    config = compose_config(["data.tokenizer_path=null", "run.name=null", "data.split=90,10,0"])
    assert (config.data.tokenizer_path, config.run.name, config.data.split) == (None, "null", "90,10,0")


def test_values_may_refer_to_other_keys() -> None:
    config = compose_config(["run.name=${model.name}-${train.seed}", "optim.decay_steps=${train.steps}"])
    assert (config.run.name, config.optim.decay_steps) == ("tiny-1234", 20)
    assert override_config(config, ["serve.host=::1", "serve.api_keys=null"]).run.name == "tiny-1234"


@pytest.mark.parametrize(("word", "value"), [("true", "true"), ("False", "false"), ("auto", "auto")])
def test_truth_values_become_text_in_choices(word: str, value: str) -> None:
    config = compose_config([f"inference.cuda_graphs={word}"])
    assert config.inference.cuda_graphs == value
    assert override_config(config, [f"inference.cuda_graphs={word}"]).inference.cuda_graphs == value


@pytest.mark.parametrize(
    ("prefix", "datasets"),
    [
        ("data/a", ((1.0, "data/a"),)),
        ("3 .7 my data", ((1.0, "3 .7 my data"),)),  # a path with spaces
        ("30 days", ((1.0, "30 days"),)),
        ("0.7 data/a .3  b 2. c", ((0.7, "data/a"), (0.3, "b"), (2.0, "c"))),
    ],
)
def test_blends_of_datasets(prefix: str, datasets: object) -> None:
    assert compose_config([f"data.prefix={prefix}"]).data.datasets == datasets


@pytest.fixture
def own_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the recipes that a test may change."""
    shutil.copytree(compose.bundled("recipes"), tmp_path / "recipes")
    monkeypatch.setattr(compose, "bundled", lambda name: tmp_path / name)
    return tmp_path / "recipes"


def test_a_recipe_with_an_unknown_key(own_recipes: Path) -> None:
    path = own_recipes / "model/tiny.yaml"
    path.write_text(path.read_text() + "num_layer: 3\n")
    message = refusal()
    assert message.startswith("recipes/model/tiny.yaml: model.num_layer: expected a key of the configuration")
    assert "Nearest: model.num_layers" in message


def test_a_recipe_with_a_wrong_type(own_recipes: Path) -> None:
    path = own_recipes / "parallelism/cp4.yaml"
    path.write_text("context_parallel_size: four\n")
    assert refusal("parallelism=cp4") == (
        "recipes/parallelism/cp4.yaml: parallelism.context_parallel_size=four: expected an integer. "
        "For example parallelism.context_parallel_size=1."
    )


def test_a_recipe_with_aliases_is_refused_by_its_name(own_recipes: Path) -> None:
    (own_recipes / "model/bomb.yaml").write_text("name: &a x\n")
    assert refusal("model=bomb") == (
        "recipes/model/bomb.yaml: expected a recipe (line 1: an anchor or alias where values are expected). "
        "Correct the file."
    )
