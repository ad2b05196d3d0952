"""Every key at the ends of its range and beyond: the value is refused in one line that names the key, or accepted."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.cli import plan
from megatron_longctx.config import RECURRENT_KEYS, Config, keys_of, validate
from megatron_longctx.config.bounds import Choice, Key, Number, choice, number
from megatron_longctx.core.errors import is_line
from megatron_longctx.planner.memory import predict
from megatron_longctx.planner.memory.reports import planned_job
from megatron_longctx.training.compose import load_config, override_config, save_config
from tests.shared.training import with_values as replaced

KEYS = keys_of(Config)
WRONG_TYPES: tuple[Any, ...] = (None, True, "x", 1.5, 1, [], {}, (1,), b"x")
NUMBERS = (-1, 0, 1, 2, 3, 2**31, 2**63, -(2**63), 10**30, 10**400, math.nan, math.inf, -math.inf, 5e-324, 1e308)
TEXTS = (
    *("", " ", "a b", "naïve ☃ 😀", "0", "-1", "null", "~", "*", "-", "--help", "a,b", "[x]", "{a: 1}", "'", "100,0,0"),
    *("..", ".", "/", "../../../etc/passwd", "/etc/passwd", "a/../..", "C:\\x", "x" * 200, "x" * 201, "/x" * 1000),
    *("x" * 10_000, "a\nb", "a\rb", "a\0b", "a\x1b[31mb", "a\u2028b", "a\ud800b", "${train.steps}", "${oc.env:HOME}"),
    *("nan", "-1,2,3", "0,1", "1e2,0,0", "foo", "1,2,3,4", "٣,0,0", "1" * 400),
)
LLAMA3 = {"model.rope_scaling.kind": "llama3", "model.rope_scaling.original_length": 64}
YARN = {"model.rope_scaling.kind": "yarn", "model.rope_scaling.original_length": 64}
SIZES = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
LATENTS = {"model.num_kv_heads": 4, "model.kv_lora_rank": 8, **{f"model.{size}": 4 for size in SIZES}}
OF_EXPERTS = (
    *(f"model.moe_{name}" for name in ("ffn_hidden_size", "shared_expert_intermediate_size", "z_loss_coeff")),
    *("model.moe_router_topk_scaling_factor", "model.moe_router_dtype", "parallelism.expert_tensor_parallel_size"),
)
DELTA_NETS = {
    "model.pattern": "G-",
    "model.linear_num_key_heads": 1,
    "model.linear_num_value_heads": 100_000,
    "model.linear_key_head_dim": 2,
    "model.linear_value_head_dim": 2,
}
# Settings without which a key must have its default.
BESIDE: dict[str, dict[str, Any]] = {
    "parallelism.inner_size": {"parallelism.schedule": "usp"},
    "parallelism.rounds": {"parallelism.schedule": "node_gather"},
    "train.eval_interval": {"data.split": "95,5,0"},
    "parallelism.outer_schedule": {"parallelism.schedule": "usp"},
    "parallelism.max_buffer_tokens": {"parallelism.schedule": "all_gather"},
    "parallelism.max_attention_gib": {"parallelism.schedule": "auto"},
    "inference.exact_reuse": {"inference.prefill_chunk": 64},
    "optim.lr": {"optim.min_lr": 0.0},
    "optim.min_lr": {"optim.lr": 100.0},
    "optim.warmup_steps": {"train.steps": 10**9},
    "optim.wsd_decay_steps": {"optim.decay_style": "WSD", "train.steps": 10**9, "optim.warmup_steps": 0},
    "optim.decay_steps": {"optim.warmup_steps": 0},
    "train.steps": {"optim.warmup_steps": 0},
    "model.num_layers": {},
    "model.window_pattern": {"model.window": 4},
    "model.window_rope_base": {"model.window": 4},
    "model.rope_scaling.factor": {"model.rope_scaling.kind": "linear"},
    "model.rope_scaling.original_length": LLAMA3,
    "model.rope_scaling.low_freq_factor": {**LLAMA3, "model.rope_scaling.high_freq_factor": 1e6},
    "model.rope_scaling.high_freq_factor": {**LLAMA3, "model.rope_scaling.low_freq_factor": 5e-324},
    "model.rope_scaling.beta_fast": {**YARN, "model.rope_scaling.beta_slow": 5e-324},
    "model.rope_scaling.beta_slow": {**YARN, "model.rope_scaling.beta_fast": 1e6},
    "model.rope_scaling.attention_factor": YARN,
    "model.rope_scaling.truncate": YARN,
    "model.num_attention_heads": {"model.num_kv_heads": 1, "model.head_dim": 2},
    "model.num_kv_heads": {"model.num_attention_heads": 100_000, "model.head_dim": 2},
    "model.hidden_size": {"model.num_attention_heads": 1, "model.num_kv_heads": 1, "model.head_dim": 2},
    "data.tokenizer": {"data.tokenizer_path": "x"},
    "model.head_dim": {"model.position_embedding": "learned"},
    **{f"model.{name}": LATENTS for name in ("kv_lora_rank", "q_lora_rank", *SIZES)},
    **{f"model.{key}": DELTA_NETS for key in RECURRENT_KEYS},
    **{key: {"model.num_moe_experts": 4} for key in OF_EXPERTS},
}


def with_values(values: dict[str, Any]) -> Config:
    """Return a configuration without validation."""
    return replaced(Config(), values)


def edges(key: Key) -> Iterator[Any]:
    """Yield values at and beyond the ends of a key's range, of its type and of others."""
    yield from WRONG_TYPES
    yield key.default
    if isinstance(key.bounds, Number):
        ends = (key.bounds.minimum, key.bounds.maximum)
        yield from NUMBERS
        yield from (round(end) + step for end in ends for step in (-1, 0, 1))
        yield from (math.nextafter(end, to) for end in ends for to in (-math.inf, math.inf))
        yield from map(float, ends)
    elif isinstance(key.bounds, Choice):
        yield from (*key.bounds.all, "", "x" * 10_000, "a\nb", str(key.bounds.all[0]).upper(), 3, math.nan)
    else:
        yield from TEXTS


def refusal(config: Config) -> str | None:
    """Return the error of `validate`, whose form is checked."""
    try:
        validate(config)
    except ValueError as error:
        message = str(error)
        assert type(error) is ValueError and is_line(message), message
        assert ": expected " in message and message.endswith((".", "?")) and len(message) < 900, message
        return message
    return None


def accepted(key: Key) -> list[Any]:
    beside = BESIDE.get(key.name, {})
    return [value for value in edges(key) if refusal(with_values({**beside, key.name: value})) is None]


@pytest.mark.parametrize("name", KEYS)
def test_values_that_a_key_cannot_have_are_refused_by_its_name(name: str) -> None:
    key, beside = KEYS[name], BESIDE.get(name, {})
    count = 0
    for value in edges(key):
        message = refusal(with_values({**beside, name: value}))
        if message is not None:
            assert name in message, (value, message)
            if isinstance(key.bounds, Choice) and type(value) is key.kind and value not in key.bounds.all:
                assert key.bounds.expected in message, (value, message)
            continue
        count += 1
        value = attrgetter(name)(with_values({**beside, name: value}))
        kind = type(value)
        assert kind is key.kind or (value is None and key.nullable) or (kind is int and key.kind is float), value
        if kind in (int, float):
            assert math.isfinite(value) and abs(value) < 2**64, value
        if kind is str:
            assert value and is_line(value) and len(value.encode()) <= 4000 and "${" not in value
    assert count, "at least the default is accepted"


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if isinstance(key.bounds, Number)])
def test_the_ends_of_a_range_are_in_it_and_values_beyond_are_not(name: str) -> None:
    key, beside = KEYS[name], BESIDE.get(name, {})
    assert isinstance(key.bounds, Number) and key.bounds.minimum < key.bounds.maximum
    for end, outward, excluded in (
        (key.bounds.minimum, -math.inf, key.bounds.above),
        (key.bounds.maximum, math.inf, key.bounds.below),
    ):
        at = key.kind(end)
        beyond = at + int(math.copysign(1, outward)) if key.kind is int else math.nextafter(at, outward)
        for value, refused in ((at, excluded), (beyond, True)):
            message = refusal(with_values({**beside, name: value})) or ""
            expected = f"{name}={value}: expected " in message and key.bounds.expected in message
            assert expected == refused, (value, message)


def test_the_examples_in_messages_are_accepted() -> None:
    for name, key in KEYS.items():
        override_config(with_values(BESIDE.get(name, {})), [f"{name}={key.example}"])


# Keys that determine a plan and its memory.
PLANNED = [
    name
    for name in KEYS
    if name.partition(".")[0] in ("model", "parallelism", "attention", "recompute", "data", "optim", "train")
    and name != "parallelism.cluster"
]


@pytest.mark.parametrize("name", PLANNED)
def test_accepted_values_have_a_plan_and_a_predicted_memory(name: str) -> None:
    """Numbers of ranks are limited to those whose plan is computed quickly."""
    size = KEYS[name].bounds.maximum if isinstance(KEYS[name].bounds, Number) else 0
    for value in accepted(KEYS[name]):
        if size == 1024 and value is not None and value > 8:
            continue
        values = {"parallelism.context_parallel_size": 2, "data.seq_length": 256, **BESIDE.get(name, {}), name: value}
        config = with_values(values)
        if refusal(config) is not None or config.parallelism.schedule == "auto":
            continue
        try:
            with redirect_stdout(StringIO()) as out:
                plan.show(config)
        except ValueError as error:  # heads that the mode cannot share, a bound that no group of all_gather fits
            assert name in str(error) or "share the heads" in str(error), (value, error)
            continue
        assert "memory of a training step: " in out.getvalue()
        if "not known" not in out.getvalue():
            memory = predict(planned_job(config))
            assert 0 < memory.num_bytes < 10**30 and type(memory.num_bytes) is int, value


def test_accepted_values_survive_a_run_folder(tmp_path: Path) -> None:
    """Saves extremes of all keys together, and every text once."""
    values = {name: accepted(key) for name, key in KEYS.items() if not isinstance(key.bounds, Choice)}
    texts = set(values["data.prefix"])
    for turn in range(TURNS := 12):
        wanted: dict[str, Any] = {}
        for place, (name, options) in enumerate(values.items()):
            candidate = {**wanted, name: options[(turn + TURNS * place) % len(options)]}
            if refusal(with_values(candidate)) is None:
                wanted = candidate
        assert len(wanted) > len(values) / 2
        texts -= {value for value in wanted.values() if isinstance(value, str)}
        config = with_values(wanted)
        save_config(config, tmp_path / "resolved.yaml")
        assert load_config(tmp_path / "resolved.yaml") == config
    assert not texts


@settings(derandomize=True, database=None, max_examples=400, deadline=None)
@given(data=st.data())
def test_several_keys_at_their_edges_are_accepted_or_refused_by_one_of_their_names(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=2, max_size=5, unique=True))
    values = {name: data.draw(st.sampled_from(list(edges(KEYS[name])))) for name in names}
    message = refusal(with_values(values))
    if message is not None:
        assert any(name in message for name in names), (values, message)


def test_a_key_without_declared_bounds_is_an_error() -> None:
    @dataclass(frozen=True)
    class Part:
        bounded: int = number(1, 0, 2)
        named: str = choice("a", ("a", "b"))
        flag: bool = False
        size: int = 3

    Whole = dataclasses.make_dataclass("Whole", [("part", Part)])
    with pytest.raises(TypeError, match=r"part\.size has no bounds: declare it by number, choice, text or path"):
        keys_of(Whole)
    assert len(KEYS) > 80
