"""Qwen3.5: Qwen3-Next's layers with dense MLPs, and delta nets with four projections. Images are left out."""

from typing import Any

from ...config import ModelConfig
from .. import common
from ..family import Family
from ..fields import Fields
from ..weights import SEPARATE_DELTA, Weight
from . import qwen3_next

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
DROPPED = ("mtp.", "model.visual.")  # multi-token prediction, images


def _read(fields: Fields) -> dict[str, Any]:
    check(fields)
    common.require_head_sizes(fields)
    keys = common.read(fields, partial_rotary=0.25)
    return keys | qwen3_next.read_mixers(fields, keys)


def check(fields: Fields) -> None:
    """Read the fields that `transformers` does not know."""
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    fields.ignore("mamba_ssm_dtype")  # of a cache; states are fp32 or wider here
    for name, value in (("attn_output_gate", True), ("output_gate_type", "swish"), ("mlp_only_layers", [])):
        fields.expect(name, value)


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**common.write(model), **qwen3_next.write_mixers(model)}


def _weights(model: ModelConfig) -> list[Weight]:
    plain = [*common.decoder_weights(model), *common.qk_norms()]
    return qwen3_next.with_mixers(plain, PROJECTIONS, SEPARATE_DELTA)


FAMILY = Family(
    "qwen3_5_text", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _read, _write, _weights,
    constants={"attention_bias": False}, keys=qwen3_next.KEYS, dropped=DROPPED,
)  # fmt: skip
