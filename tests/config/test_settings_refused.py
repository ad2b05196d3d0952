"""Wrong settings: one ValueError each, that names the value, what is expected and what to do."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from megatron_longctx import compose
from megatron_longctx.compose import compose_config, override_config
from megatron_longctx.config import Config, data_parallel_size, validate

NO_RECIPES = "which has no recipes to choose from"


def refusal(*words: str) -> str:
    with pytest.raises(ValueError) as caught:
        compose_config(words)
    assert type(caught.value) is ValueError
    assert caught.value.__cause__ is None and caught.value.__suppress_context__ in (True, False)
    text = str(caught.value)
    assert "expected" in text and "\n" not in text and text.endswith((".", "?"))
    for foreign in ("Error merging", "omegaconf", "DictConfig", "mismatched input", "Lexer", "NoneType"):
        assert foreign not in text
    return text


WHOLE_MESSAGES = {
    "train.stepz=3": (
        "train.stepz: expected a key of the configuration; there is none of this name. "
        "Nearest: train.steps, train.seed, train.save."
    ),
    "train.steps=abc": "train.steps=abc: expected an integer. For example train.steps=20.",
    "data.prefix=???": "data.prefix=???: expected text. For example data.prefix=data/stdlib.",
    "run.name=a\nb": "run.name=a\\nb: expected a plain folder name of at most 200 bytes. default is the default.",
    "model=tin": (
        f"model=tin: expected one of {', '.join(compose.recipes()['model'])}. Nearest: tiny, tiny_moe, tiny_mla."
    ),
    "~train.steps": (
        "~train.steps: expected key=value; keys cannot be removed. Leave train.steps out to have its default."
    ),
    "parallelism.schedule=allgather": (
        "parallelism.schedule=allgather: expected one of auto, all_gather, double_ring, helper, ring, zigzag, striped, "
        "tasp, ulysses, usp. "
        "Did you mean parallelism.schedule=all_gather?"
    ),
    "model.num_kv_heads=3": (
        "model.num_kv_heads=3: expected a divisor of model.num_attention_heads=4. Nearest that divide it: 2, 4, 1."
    ),
    "optim.beta2=1": "optim.beta2=1.0: expected at least 0 and less than 1. 0.95 is the default.",
    "parallelism.max_buffer_tokens=64": (
        "parallelism.max_buffer_tokens=64: expected null with parallelism.schedule=zigzag. Only all_gather groups its "
        "sources under a bound; leave it null or set parallelism.schedule=all_gather."
    ),
}


@pytest.mark.parametrize("word", WHOLE_MESSAGES)
def test_whole_messages(word: str) -> None:
    assert refusal(word) == WHOLE_MESSAGES[word]


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("modle=tiny", "model"),
        ("steps=3", "train.steps"),
        ("context_parallel_size=4", "parallelism.context_parallel_size"),
        ("schedule=ring", "parallelism.schedule"),
        ("lr=1e-4", "optim.lr"),
        ("paralelism.schedule=ring", "parallelism.schedule"),
        ("Train.steps=3", "train.steps"),
        ("train.steps.x=3", "train.steps"),
        ("experiment@foo=demo", "experiment"),
        ("+train.stepz=3", "train.steps"),
        ("++modle.name=x", "model.name"),
    ],
)
def test_unknown_keys_name_the_nearest(word: str, nearest: str) -> None:
    said = refusal(word)
    name = word.split("=")[0].lstrip("+")
    assert said.startswith(f"{name}: expected a key of the configuration; there is none of this name. Nearest: ")
    assert nearest in said.split("Nearest: ")[1].rstrip(".").split(", ")


@pytest.mark.parametrize("word", ["foo=1", "+foo=1", "hydra.run.dir=x", "schema=x", "a=b=c"])
def test_unknown_keys_like_nothing_we_have(word: str) -> None:
    name = word.split("=")[0].lstrip("+")
    said = refusal(word)
    assert said.startswith(f"{name}: expected a key of the configuration") and "config/tree.py" in said


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("model=lama3_8b", "llama3_8b"), ("parallelism=tp2cp4", "tp2_cp4"), ("experiment=dem", "demo")],
)
def test_unknown_recipes_name_the_nearest(word: str, nearest: str) -> None:
    said = refusal(word)
    assert said.startswith(f"{word}: expected one of ") and nearest in said.split("Nearest: ")[1]


@pytest.mark.parametrize("word", ["model=../config", "model=null", "experiment=null", "parallelism=cp2,cp4", "model="])
def test_what_is_no_recipe_is_refused_as_one(word: str) -> None:
    assert refusal(word).startswith(f"{word}: expected one of ")


@pytest.mark.parametrize("word", ["train=3", "data=foo", "attention=zigzag", "optim={lr: 1}"])
def test_a_section_is_not_a_key(word: str) -> None:
    section = word.split("=")[0]
    said = refusal(word)
    assert said.startswith(f"{word}: expected one of the keys inside {section}, {NO_RECIPES}. Set {section}.")


@pytest.mark.parametrize("word", ["hello", "=3", "train.steps", "", "experiment"])
def test_words_that_set_nothing(word: str) -> None:
    said = refusal(word)
    assert said.startswith(f"{word}: expected a setting of the form group=NAME or key.subkey=value. ")
    if word in ("train.steps", "experiment"):
        assert said.endswith(f"Did you mean {word}=…?")


@pytest.mark.parametrize("word", ["~train", "~model", "~train.steps", "~foo=1", "~"])
def test_removals(word: str) -> None:
    assert refusal(word).startswith(f"{word}: expected key=value; keys cannot be removed. Leave ")


def every_key(cls: Any = Config, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, kind in get_type_hints(cls).items():
        found |= every_key(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else {prefix + name: kind}
    return found


@pytest.mark.parametrize("key", every_key())
def test_every_key_answers_a_wrong_type(key: str) -> None:
    kinds = get_args(every_key()[key]) or (every_key()[key],)
    word = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[
        next(k for k in kinds if k is not type(None))
    ]
    nullable = " or null" if type(None) in kinds else ""
    wrong = f"{key}=???" if str in kinds else f"{key}=abc"
    assert refusal(wrong).startswith(f"{wrong}: expected {word}{nullable}. For example {key}=")
    if not nullable and str not in kinds:
        assert refusal(f"{key}=null").startswith(f"{key}=null: expected {word}")


@pytest.mark.parametrize(
    "word",
    [
        "train.steps=2.5",
        "train.steps=1 2",
        "train.steps=",
        "train.seed=0x1",
        "train.steps={a:1}",
        "data.seq_length=${nope}",
    ],
)
def test_what_is_not_an_integer(word: str) -> None:
    key = word.split("=")[0]
    assert refusal(word).startswith(f"{word}: expected an integer. For example {key}=")


@pytest.mark.parametrize("key", ["train.steps", "optim.lr", "train.save", "run.name", "model", "nothing"])
@pytest.mark.parametrize("value", ["[" * 3000 + "]" * 3000, "{a:" * 3000, "(" * 3000, "9" * 5000, "x" * 20_000])
def test_values_that_are_long_or_deep_are_refused_in_a_line_by_all_readers_of_words(key: str, value: str) -> None:
    said = refusal(f"{key}={value}")
    assert said.startswith((f"{key}={value[:100]}"[:100], f"{key}: ")) and len(said) < 700
    with pytest.raises(ValueError, match=rf"^{key}") as caught:
        override_config(Config(), [f"{key}={value}"])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize("word", ["a\nb=3", "a\nb", "~a\nb", "+train.steps=1\n2"])
def test_a_word_of_several_lines_is_refused_in_one(word: str) -> None:
    refusal(word)


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        (["train.steps=0"], "train.steps=0", "at least 1"),
        (["optim.beta1=-0.1"], "optim.beta1=-0.1", "less than 1"),
        (["optim.min_lr=1"], "optim.min_lr=1.0", "at most optim.lr=0.0003"),
        (["optim.decay_style=WSD"], "optim.wsd_decay_steps=None", "a number with optim.decay_style=WSD"),
        (["optim.wsd_decay_steps=3"], "optim.wsd_decay_steps=3", "null with any other"),
        (["optim.decay_style=WSD", "optim.wsd_decay_steps=11"], "optim.wsd_decay_steps=11", "at most 10, the steps"),
        (["optim.warmup_steps=20"], "optim.warmup_steps=20", "fewer steps than the decay (20"),
        (["optim.decay_steps=5"], "optim.warmup_steps=10", "fewer steps than the decay (5"),
        (["reduction.group_size=48"], "reduction.group_size=48", "one of 32, 64, 128"),
        (["attention.kernel=Triton 3"], "attention.kernel=Triton 3", "auto or the name of a kernel"),
        (
            ["parallelism.schedule=ulysses", "parallelism.layout=zigzag"],
            "parallelism.layout=zigzag",
            "one of auto, contiguous",
        ),
        (
            ["parallelism=cp4", "parallelism.schedule=usp", "parallelism.layout=balanced"],
            "parallelism.layout=balanced",
            "another schedule than usp",
        ),
        (
            ["parallelism.head_chunks=2"],
            "parallelism.head_chunks=2",
            "1, its default, with parallelism.schedule=zigzag",
        ),
        (["model.window_pattern=2"], "model.window_pattern=2", "null with model.window=null"),
        (
            ["attention.sum_in_node=true", "parallelism=cp2"],
            "attention.sum_in_node=true",
            "parallelism.cluster, which defines the nodes",
        ),
        (
            ["attention.keep_received=true", "recompute=attention_output"],
            "attention.keep_received=true",
            "auto or false with recompute.mode=attention_output",
        ),
        (["parallelism.schedule=p2p"], "parallelism.schedule=p2p", "Did you mean parallelism.schedule=ring?"),
        (["data.tokenizer=huggingface"], "data.tokenizer_path=None", "a path for data.tokenizer=huggingface"),
        (["run.name=a/b"], "run.name=a/b", "a plain folder name"),
        (["run.name="], "run.name=", "a plain folder name"),
        (["run.name=.."], "run.name=..", "a plain folder name"),
        (["model.num_attention_heads=5"], "model.num_attention_heads=5", "a divisor of model.hidden_size=128"),
        (["model.head_dim=7"], "model.head_dim=7", "an even head dimension with rope"),
        (
            ["attention.kv_int8=true", "model.head_dim=6", "parallelism=cp2"],
            "attention.kv_int8=True",
            "false with model.head_dim=6, which 4 does not divide",
        ),
        (
            ["model=gpt2", "parallelism.tensor_parallel_size=5"],
            "parallelism.tensor_parallel_size=5",
            "a divisor of model.num_kv_heads=12. Nearest that divide it: 4, 6, 3",
        ),
        (
            ["parallelism.tensor_parallel_size=4"],
            "parallelism.tensor_parallel_size=4",
            "a divisor of model.num_kv_heads=2. Nearest that divide it: 2, 1",
        ),
        (
            ["parallelism.tensor_parallel_size=2", "data.seq_length=4095"],
            "parallelism.tensor_parallel_size=2",
            "a divisor of data.seq_length=4095",
        ),
        (
            ["parallelism.tensor_parallel_size=2", "model.vocab_size=513"],
            "parallelism.tensor_parallel_size=2",
            "a divisor of model.vocab_size=513",
        ),
        (
            ["parallelism.pipeline_parallel_size=3"],
            "parallelism.pipeline_parallel_size=3",
            "a divisor of model.num_layers=4. Nearest that divide it: 2, 4",
        ),
        (
            ["parallelism.schedule=ring", "parallelism.max_buffer_tokens=8"],
            "parallelism.max_buffer_tokens=8",
            "null with parallelism.schedule=ring",
        ),
        (
            ["parallelism.max_attention_gib=2"],
            "parallelism.max_attention_gib=2.0",
            "null with parallelism.schedule=zigzag",
        ),
        (
            ["parallelism.inner_size=2", "parallelism.context_parallel_size=4"],
            "parallelism.inner_size=2",
            "null with parallelism.schedule=zigzag",
        ),
        (
            ["parallelism.schedule=usp", "parallelism.inner_size=3", "parallelism.context_parallel_size=4"],
            "parallelism.inner_size=3",
            "a divisor of parallelism.context_parallel_size=4. Nearest that divide it: 2, 4, 1",
        ),
        (
            ["parallelism.outer_schedule=ring"],
            "parallelism.outer_schedule=ring",
            "zigzag, its default, with parallelism.schedule=zigzag",
        ),
        (
            ["parallelism.schedule=usp", "parallelism.outer_schedule=ulysses"],
            "parallelism.outer_schedule=ulysses",
            "one of all_gather, double_ring, helper, ring, zigzag, tasp",
        ),
        (
            ["parallelism.overlap_param_gather=true", "optim.distributed=false"],
            "parallelism.overlap_param_gather=true",
            "auto or false with optim.distributed=false",
        ),
        (
            ["attention.baseline=te_p2p", "recompute=attention_output"],
            "recompute.mode=attention_output",
            "none or layer with attention.baseline=te_p2p. Change it, or leave attention.baseline null.",
        ),
        (["attention.baseline=te_p2p", "model.window=64"], "model.window=64", "null with attention.baseline=te_p2p"),
        (["attention.baseline=te_a2a", "model.sinks=learnable"], "model.sinks=learnable", "none with attention.base"),
        (
            ["attention.baseline=te_a2a", "attention.deterministic=true"],
            "attention.deterministic=True",
            "false with attention.baseline=te_a2a",
        ),
        (
            ["attention.baseline=te_a2a", "attention.overlap=false"],
            "attention.overlap=False",
            "true with attention.baseline=te_a2a",
        ),
        (["attention.baseline=te_a2a", "train.device=cpu"], "train.device=cpu", "auto or cuda with attention.baseline"),
        (
            ["attention.baseline=te_a2a", "parallelism=cp4", "data.seq_length=4100"],
            "2 x parallelism.context_parallel_size=8",
            "a divisor of data.seq_length=4100",
        ),
        (
            ["data.packing=best_fit", "train.micro_batch_size=2", "train.global_batch_size=2"],
            "train.micro_batch_size=2",
            "1 with data.packing=best_fit. A pack is one sequence",
        ),
        (["data.prefix=1 a 0 b"], "data.prefix=1 a 0 b", "weights that are each at least 1/10000 of their sum;"),
        (["data.prefix=0 a 0 b"], "data.prefix=0 a 0 b", "weights that are each at least 1/10000 of their sum;"),
    ],
)
def test_values_out_of_range(words: list[str], given: str, expected: str) -> None:
    said = refusal(*words)
    assert said.startswith(f"{given}: expected ") and expected in said


def test_what_is_in_range_at_its_ends() -> None:
    compose_config(["parallelism.schedule=all_gather", "parallelism.max_buffer_tokens=2"])
    compose_config(["optim.warmup_steps=19"])
    compose_config(["attention.baseline=te_all_gather", "model.window=64", "recompute=layer", "parallelism=cp4"])
    compose_config(["optim.min_lr=3e-4", "optim.beta1=0", "optim.clip_grad=0"])


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (
            ["parallelism=tp2_cp4"],
            12,
            "world size=12: expected a multiple of tensor 2 x context 4 x pipeline 1 = 8. "
            "Start that many ranks or change the parallelism sizes.",
        ),
        (
            ["parallelism=cp4", "parallelism.data_parallel_size=3"],
            8,
            "parallelism.data_parallel_size=3: expected 2, since 8 ranks / (tensor 1 x context 4 x pipeline 1) = 2. "
            "Set it to 2 or null, or start 12 ranks.",
        ),
        (
            ["parallelism=cp2", "train.global_batch_size=9", "train.micro_batch_size=2"],
            4,
            "train.global_batch_size=9: expected a multiple of train.micro_batch_size x data-parallel ranks = 2 x 2. "
            "Nearest: 8 or 12.",
        ),
    ],
)
def test_sizes_that_do_not_make_the_world(words: list[str], world: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        data_parallel_size(compose_config(words), world)
    assert str(caught.value) == message


def test_sizes_that_make_the_world() -> None:
    config = compose_config(["parallelism=tp2_cp4", "train.global_batch_size=6"])
    assert [data_parallel_size(config, world) for world in (8, 16, 24)] == [1, 2, 3]


def test_validate_takes_the_default() -> None:
    validate(Config())
