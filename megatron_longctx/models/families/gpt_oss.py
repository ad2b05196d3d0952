"""gpt-oss: experts with biases and a clamped SwiGLU, sinks, windows in every other layer."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from .. import common
from ..common import ATTENTION, MLP, PUBLISHED_ATTENTION, PUBLISHED_MLP
from ..family import Family
from ..fields import RESTORE, Fields, refuse_field
from ..rope import read_rope, write_rope
from ..weights import TRANSPOSED_EXPERTS, TRANSPOSED_EXPERTS_GATE_UP, Weight

_FUNCTION = {"activation": "swiglu_oai", "bias": True, "sinks": "learnable"}
_CONSTANTS = {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _read(fields: Fields) -> dict[str, Any]:
    for name, value in _CONSTANTS.items():
        fields.expect(name, value)
    fields.require("head_dim", "num_key_value_heads")  # defaults of `transformers` are those of one size
    keys = common.read(fields, norm_epsilon=1e-5)
    experts = common.read_experts(fields, fields.require("num_local_experts"))
    fields.expect("experts_per_token", experts["moe_router_topk"])
    fields.ignore("initial_context_length")  # rope_scaling has it, too
    if "rope_scaling" not in fields and "rope_parameters" not in fields:
        expected = "an object: without it, `transformers` takes the scaling of one size"
        raise refuse_field("rope_scaling", None, expected, RESTORE)
    width, types = fields.get("sliding_window", None, int), fields.get("layer_types", None, list)
    windows = common.read_windows(width, types, keys["num_layers"])
    return {**keys, **read_rope(fields, default_base=150_000.0), **windows, **experts, **_FUNCTION}


def _write(model: ModelConfig) -> dict[str, Any]:
    rope = write_rope(model)
    return {
        **common.write(model),
        **rope,
        **common.write_experts(model),
        **_CONSTANTS,
        "rope_scaling": rope["rope_scaling"] or {"rope_type": "default"},
        "num_local_experts": model.num_moe_experts,
        "sliding_window": common.sliding_window(model),
        "layer_types": common.layer_types(model),
    }


def _weights(model: ModelConfig) -> list[Weight]:
    gate_up, down = f"{PUBLISHED_MLP}experts.gate_up_proj", f"{PUBLISHED_MLP}experts.down_proj"
    first, second = ((gate_up,), TRANSPOSED_EXPERTS_GATE_UP), ((down,), TRANSPOSED_EXPERTS)
    bias = f"{MLP}experts.experts.linear_fc%d.bias"
    return [
        *common.with_experts(common.decoder_weights(model), f"{PUBLISHED_MLP}router.", first, second),
        common.qkv_bias(),
        common.output_bias(),
        Weight(f"{ATTENTION}core_attention.softmax_offset", (f"{PUBLISHED_ATTENTION}sinks",), ("heads",)),
        Weight(f"{MLP}router.bias", (f"{PUBLISHED_MLP}router.bias",), ("experts",)),
        Weight(bias % 1, (f"{gate_up}_bias",), ("experts", "expert_gate_up"), TRANSPOSED_EXPERTS_GATE_UP),
        Weight(bias % 2, (f"{down}_bias",), ("experts", "hidden")),
    ]


FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), _read, _write, _weights)
