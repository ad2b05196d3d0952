"""Qwen2 and Qwen2.5: Llama's form with a bias of queries, keys and values."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..family import Family, Weight
from ..fields import Fields
from ..rope import read_rope, write_rope
from .llama import common_weights, qkv_bias, read_common, write_common


def full_attention_only(given: Fields) -> None:
    """Refuse windows, which `layer_types` and `use_sliding_window` may ask for.

    Raises:
        ValueError: names the field.
    """
    given.only("use_sliding_window", False)
    given.harmless("sliding_window", "max_window_layers")  # without use_sliding_window
    types = given.take("layer_types", [])
    given.only("layer_types", ["full_attention"] * len(types))


def _read(given: Fields) -> dict[str, Any]:
    full_attention_only(given)
    return {**read_common(given), **read_rope(given), "qkv_bias": True}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_common(model), **write_rope(model), "use_sliding_window": False}


def _weights(model: ModelConfig) -> list[Weight]:
    return [*common_weights(model), qkv_bias()]


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), _read, _write, _weights)
