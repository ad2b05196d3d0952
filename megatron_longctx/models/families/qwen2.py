"""Qwen2 and Qwen2.5: Llama's form with a bias of queries, keys and values."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import common
from ..family import Family
from ..fields import Fields
from ..rope import read_rope, write_rope
from ..weights import Weight


def _read(fields: Fields) -> dict[str, Any]:
    common.full_attention_only(fields)
    return {**common.read(fields), **read_rope(fields), "qkv_bias": True}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**common.write(model), **write_rope(model), "use_sliding_window": False}


def _weights(model: ModelConfig) -> list[Weight]:
    return [*common.decoder_weights(model), common.qkv_bias()]


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), _read, _write, _weights)
