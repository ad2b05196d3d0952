"""Qwen3.5: Qwen3-Next's layers with dense MLPs, and delta nets with four projections. Images are left out."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import common
from ..family import Family
from ..fields import Fields
from ..weights import SEPARATE_DELTA, Weight
from . import qwen3_next

DROPPED = ("mtp.", "model.visual.")  # multi-token prediction, images
_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def _read(fields: Fields) -> dict[str, Any]:
    keys = read_decoder(fields)
    return keys | qwen3_next.read_mixers(fields, keys)


def read_decoder(fields: Fields, width: str = "intermediate_size") -> dict[str, Any]:
    """Read the fields of all layers. width: see `common.read`."""
    common.require_head_sizes(fields)
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    fields.ignore("mamba_ssm_dtype")  # of a cache; states are fp32 or wider here
    fields.expect("attn_output_gate", True)
    fields.expect("output_gate_type", "swish")
    fields.expect("mlp_only_layers", [])
    return common.read(fields, partial_rotary=0.25, width=width)


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**common.write(model), **qwen3_next.write_mixers(model)}


def _weights(model: ModelConfig) -> list[Weight]:
    return with_mixers([*common.decoder_weights(model), *common.qk_norms()])


def with_mixers(plain: list[Weight]) -> list[Weight]:
    return qwen3_next.with_mixers(plain, _PROJECTIONS, SEPARATE_DELTA)


FAMILY = Family(
    "qwen3_5_text", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _read, _write, _weights,
    constants={"attention_bias": False}, keys=qwen3_next.KEYS, dropped=DROPPED,
)  # fmt: skip
