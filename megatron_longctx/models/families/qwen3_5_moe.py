"""Qwen3.5 with experts in every layer, and one that all tokens share."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import common
from ..family import Family
from ..fields import Fields
from ..weights import Weight
from . import qwen3_5, qwen3_moe, qwen3_next

_WIDTH = "moe_intermediate_size"


def _read(fields: Fields) -> dict[str, Any]:
    keys = qwen3_5.read_decoder(fields, width=_WIDTH)
    fields.ignore("intermediate_size")  # of dense MLPs, which no layer has
    fields.expect("norm_topk_prob", True)
    fields.expect("decoder_sparse_step", 1)
    keys |= common.read_experts(fields, fields.require("num_experts"))
    keys |= {
        "moe_ffn_hidden_size": fields.require(_WIDTH),
        "moe_shared_expert_intermediate_size": fields.require(qwen3_next.SHARED_WIDTH),
    }
    return keys | qwen3_next.read_mixers(fields, keys)


def _write(model: ModelConfig) -> dict[str, Any]:
    fields = common.write(model)
    del fields["intermediate_size"]
    return {
        **fields,
        **common.write_experts(model),
        "num_experts": model.num_moe_experts,
        _WIDTH: model.expert_width,
        qwen3_next.SHARED_WIDTH: model.moe_shared_expert_intermediate_size,
        **qwen3_next.write_mixers(model),
    }


def _weights(model: ModelConfig) -> list[Weight]:
    return qwen3_5.with_mixers([*qwen3_moe.weights(model), *qwen3_next.shared_expert_weights()])


FAMILY = Family(
    "qwen3_5_moe_text", ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), _read, _write, _weights,
    constants={"attention_bias": False}, keys=qwen3_next.KEYS | {"moe_shared_expert_gate": True},
    dropped=qwen3_5.DROPPED,
)  # fmt: skip
