"""Qwen2 and Qwen2.5: Llama's form with a bias of queries, keys and values."""

from typing import Any

from ...config import ModelConfig
from .. import common
from ..family import Family
from ..fields import Fields
from ..weights import Weight


def _read(fields: Fields) -> dict[str, Any]:
    common.full_attention_only(fields)
    return common.read(fields)


def _weights(model: ModelConfig) -> list[Weight]:
    return [*common.decoder_weights(model), common.qkv_bias()]


FAMILY = Family(
    "qwen2", ("Qwen2ForCausalLM",), _read, common.write, _weights,
    constants={"use_sliding_window": False}, keys={"qkv_bias": True},
)  # fmt: skip
