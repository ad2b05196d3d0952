"""Qwen3: Llama's form with norms of queries and keys."""

from typing import Any

from ...config import ModelConfig
from .. import common
from ..family import Family
from ..fields import Fields
from ..weights import Weight


def _read(fields: Fields) -> dict[str, Any]:
    common.full_attention_only(fields)
    common.require_head_sizes(fields)
    return common.read(fields)


def _weights(model: ModelConfig) -> list[Weight]:
    return [*common.decoder_weights(model), *common.qk_norms()]


FAMILY = Family(
    "qwen3", ("Qwen3ForCausalLM",), _read, common.write, _weights,
    constants={"attention_bias": False, "use_sliding_window": False}, keys={"qk_norm": True},
)  # fmt: skip
