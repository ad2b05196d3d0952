"""Qwen3: Llama's form with norms of queries and keys."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..family import Family, Weight
from ..fields import Fields
from ..rope import read_rope, write_rope
from .llama import ATTENTION, THEIR_ATTENTION, common_weights, read_common, write_common
from .qwen2 import full_attention_only


def qk_norms() -> list[Weight]:
    return [
        Weight(f"{ATTENTION}{name}_layernorm.weight", (f"{THEIR_ATTENTION}{name}_norm.weight",), ("head",))
        for name in "qk"
    ]


def _read(given: Fields) -> dict[str, Any]:
    full_attention_only(given)
    given.only("attention_bias", False)
    for name in ("head_dim", "num_key_value_heads"):  # defaults of `transformers` are those of one size
        given.need(name)
    return {**read_common(given), **read_rope(given), "qk_norm": True}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_common(model), **write_rope(model), "attention_bias": False, "use_sliding_window": False}


def _weights(model: ModelConfig) -> list[Weight]:
    return [*common_weights(model), *qk_norms()]


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), _read, _write, _weights)
