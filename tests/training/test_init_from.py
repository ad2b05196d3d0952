"""A run starts with another run's weights, at any parallel sizes, and with a new optimizer."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_longctx.cli import cli
from megatron_longctx.cli.conversion import export_model, import_model
from megatron_longctx.config import Config
from megatron_longctx.mcore import checkpoint_folder, checkpoint_weights
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training import preflight
from megatron_longctx.training.compose import compose_config, override_config
from megatron_longctx.training.text import Source, prepare
from tests.shared.published import TEXTS, same, tensors_of, write_model
from tests.shared.training import Job, run_jobs, tiny_config, tiny_corpus

pytestmark = pytest.mark.usefixtures("on_cpu")
LENGTH = 48
COMMON = (
    f"data.seq_length={LENGTH}", "data.workers=0", "train.device=cpu", "logging.wandb=disabled", "optim.warmup_steps=0",
    "model.implementation=local", "train.steps=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a published model, its imported run and a corpus; and the model in `transformers`."""
    root = tmp_path_factory.mktemp("imported")
    model = write_model(root / "source", "qwen2", torch.float32)
    import_model(str(root / "source"), [f"out={root / 'run'}"])
    (root / "text").mkdir()
    (root / "text/a.txt").write_text("\n".join(TEXTS * 40))
    prepare(Source(str(root / "text/a.txt")), root / "corpus", "huggingface", str(root / "run/tokenizer"))
    return root, model


def config_of(root: Path, name: str, *words: str) -> Config:
    where = (f"data.prefix={root / 'corpus'}", f"run.root={root}", f"run.name={name}")
    return compose_config([*COMMON, *where, f"train.init_from={root / 'run'}", *words])


def test_the_first_loss_is_the_published_models(imported: tuple[Path, Any]) -> None:
    root, model = imported
    still = ("optim.lr=0", "optim.min_lr=0", "train.precision=fp32")
    jobs = [
        Job(config_of(root, "cp2", *still, "parallelism.context_parallel_size=2")),
        Job(config_of(root, "pp2", "train.precision=fp32", "parallelism.pipeline_parallel_size=2")),
        Job(config_of(root, "tp2", "train.precision=bf16", "parallelism.tensor_parallel_size=2")),
    ]
    records = run_distributed(run_jobs, 2, jobs)[0]
    expected = _loss(model, root)
    assert math.isclose(records[0].losses[0], expected, rel_tol=1e-5)
    assert math.isclose(records[1].losses[0], expected, rel_tol=1e-5)
    assert math.isclose(records[2].losses[0], expected, rel_tol=2e-2)
    # With a learning rate of 0, the exported weights equal the imported ones.
    export_model([f"checkpoint={root / 'cp2'}", f"out={root / 'back'}"])
    assert same(tensors_of(root / "back"), tensors_of(root / "source"))
    export_model([f"checkpoint={root / 'pp2'}", f"out={root / 'learned'}"])
    assert not same(tensors_of(root / "learned"), tensors_of(root / "source"))


def _loss(model: Any, root: Path) -> float:
    """Return the loss of the first sample."""
    from megatron_longctx.mcore.data import TrainingData
    from megatron_longctx.mcore.tokenizer import build_tokenizer

    config = config_of(root, "unused")
    tokenizer = build_tokenizer("huggingface", str(root / "run/tokenizer"))
    batch = TrainingData(config, tokenizer, config.model.vocab_size or 0)[[0]]
    with torch.inference_mode():
        logits = model(batch.tokens).logits[0]
    return float(torch.nn.functional.cross_entropy(logits, batch.labels[0]))


def test_a_runs_own_checkpoints_have_priority(imported: tuple[Path, Any]) -> None:
    root, _ = imported
    jobs = [
        Job(config_of(root, "resumed", "train.precision=fp32", f"train.steps={n}", "optim.decay_steps=3"))
        for n in (2, 3)
    ]
    once = Job(config_of(root, "once", "train.precision=fp32", "train.steps=3"))
    (first, second, whole) = run_distributed(run_jobs, 1, [*jobs, once])[0]
    assert (second.first_step, second.last_step) == (2, 3)
    assert first.losses + second.losses == whole.losses
    assert preflight.check(config_of(root, "resumed", "train.steps=4"), 1)[0] == 3


def test_model_and_tokenizer_are_the_runs_by_default(imported: tuple[Path, Any]) -> None:
    root, _ = imported
    config = config_of(root, "x", "model.rope_base=5e5", "data.seq_length=1024")
    assert (config.model.name, config.model.vocab_size, config.model.qkv_bias) == ("qwen2", 300, True)
    assert (config.data.tokenizer, config.model.rope_base) == ("huggingface", 5e5)
    assert config.data.tokenizer_path == str(root / "run/tokenizer")
    assert config_of(root, "x", "model.rope_scaling.kind=linear", "model.rope_scaling.factor=2").model.rope_base == 1e4
    assert config_of(root, "x", "model=gpt2").model.name == "gpt2"
    own = config_of(root, "x", "data.tokenizer=byte-level")
    assert (own.data.tokenizer_path, own.model.name) == (None, "qwen2")
    assert override_config(own, ["train.init_from=null"]).train.init_from is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.num_layers=1"], r"is of another model \(num_layers: checkpoint 2, model 1\)"),
        (
            ["model=llama3_8b", "train.check_memory=false"],
            r"is of another model \(.*hidden_size: checkpoint 32, model 4096",
        ),
        (["model.qkv_bias=false"], r"qkv_bias: checkpoint True, model '\(absent\)'"),
    ],
)
def test_weights_of_another_model_are_refused_before_a_rank_starts(
    imported: tuple[Path, Any], words: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        preflight.check(config_of(imported[0], "new", *words), 1)


EMBEDDING = "embedding.word_embeddings.weight"


def test_another_run_with_other_sizes_padding_and_optimizer(tmp_path: Path) -> None:
    tiny_corpus(tmp_path / "corpus")
    saved: dict[str, Any] = {"train.steps": 3, "train.save": True, "train.global_batch_size": 2}
    still = {**saved, "optim.lr": 0.0, "optim.min_lr": 0.0, "train.steps": 1, "optim.warmup_steps": 0}
    cp, tp, pp = ({f"parallelism.{axis}_parallel_size": 2} for axis in ("context", "tensor", "pipeline"))

    def config(name: str, source: str, *settings: dict[str, Any]) -> Config:
        merged = {key: value for each in (still, *settings) for key, value in each.items()}
        return tiny_config(tmp_path, name, {**merged, "train.init_from": str(tmp_path / source)})

    wider = {"model.vocab_multiple": 200, "optim.distributed": False}
    configs = [
        tiny_config(tmp_path, "source", saved),
        config("same", "source", cp),
        config("wider", "source", tp, wider),
        config("back", "wider", pp),
        config("extended", "source", cp, {"data.seq_length": 160, "model.rope_base": 4000.0}),
    ]
    _, same_, wider_, back, extended = run_distributed(run_jobs, 2, [Job(each) for each in configs])[0]
    assert (same_.first_step, same_.last_step) == (0, 1)
    # Rows without a token are 0, and so are their logits, which have a little of the probability.
    assert same_.losses[0] < wider_.losses[0] < same_.losses[0] + 0.5
    assert math.isclose(back.losses[0], same_.losses[0], rel_tol=1e-6)
    assert extended.losses[0] != same_.losses[0] and math.isfinite(extended.losses[0])
    rows = {}
    for name in ("source", "wider", "back"):
        path = checkpoint_folder.iteration_directory(tmp_path / name / "checkpoints", 3 if name == "source" else 1)
        size = 600 if name == "wider" else 512
        rows[name] = checkpoint_weights.Reader(path).read(EMBEDDING, None, (size, 32))
    assert torch.equal(rows["wider"][:512], rows["source"]) and not rows["wider"][512:].any()
    assert torch.equal(rows["back"], rows["source"])
    new = dataclasses.replace(configs[2], run=dataclasses.replace(configs[2].run, name="new"))
    assert preflight.check(new, 2)[0] is None


def test_a_vocabulary_without_a_row_for_every_token_is_refused(imported: tuple[Path, Any]) -> None:
    tiny_corpus(imported[0] / "bytes")
    words = ("data.tokenizer=byte-level", "model.vocab_size=512", "train.check_data=false")
    with pytest.raises(
        ValueError, match=r"a row of the vocabulary for each of the tokenizer's 5\d\d tokens; it has 300"
    ):
        preflight.check(config_of(imported[0], "new", f"data.prefix={imported[0] / 'bytes'}", *words), 1)


def test_other_rope_settings_and_lengths_are_allowed(imported: tuple[Path, Any]) -> None:
    assert preflight.check(config_of(imported[0], "new", "model.rope_base=5e5", "data.seq_length=64"), 1)[0] is None


def test_a_missing_run_and_a_run_with_weights_alone_are_refused(
    imported: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = imported
    assert cli.main(["train", f"train.init_from={root / 'nowhere'}"]) == 2
    assert "expected a run's configuration there" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"run\.name=run: expected a run that was trained; .* has weights alone"):
        preflight.check(config_of(root, "run"), 1)
