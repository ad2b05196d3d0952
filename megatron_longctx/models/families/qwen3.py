"""Qwen3: Llama's form with norms of queries and keys."""

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
    fields.expect("attention_bias", False)
    fields.require("head_dim", "num_key_value_heads")  # defaults of `transformers` are those of one size
    return {**common.read(fields), **read_rope(fields), "qk_norm": True}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**common.write(model), **write_rope(model), "attention_bias": False, "use_sliding_window": False}


def _weights(model: ModelConfig) -> list[Weight]:
    return [*common.decoder_weights(model), *common.qk_norms()]


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), _read, _write, _weights)
