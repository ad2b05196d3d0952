"""gpt-oss: experts with biases and a clamped SwiGLU, sinks, windows in every other layer."""

from typing import Any

from ...config import ModelConfig
from .. import common
from ..common import ATTENTION, MLP, PUBLISHED_ATTENTION, PUBLISHED_MLP
from ..family import Family
from ..fields import RESTORE, Fields, refuse_field
from ..weights import TRANSPOSED_EXPERTS, TRANSPOSED_EXPERTS_GATE_UP, Weight


def _read(fields: Fields) -> dict[str, Any]:
    common.require_head_sizes(fields)
    keys = common.read(fields, norm_epsilon=1e-5, rope_base=150_000.0)
    experts = common.read_experts(fields, fields.require("num_local_experts"))
    fields.expect("experts_per_token", experts["moe_router_topk"])
    fields.ignore("initial_context_length")  # rope_scaling has it, too
    if "rope_scaling" not in fields and "rope_parameters" not in fields:
        expected = "an object: without it, `transformers` takes the scaling of one size"
        raise refuse_field("rope_scaling", None, expected, RESTORE)
    width, types = fields.get("sliding_window", None, int), fields.get("layer_types", None, list)
    return keys | experts | common.read_windows(width, types, keys["num_layers"])


def _write(model: ModelConfig) -> dict[str, Any]:
    fields = common.write(model)
    return {
        **fields,
        **common.write_experts(model),
        "rope_scaling": fields["rope_scaling"] or {"rope_type": "default"},
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


FAMILY = Family(
    "gpt_oss", ("GptOssForCausalLM",), _read, _write, _weights,
    constants={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    keys={"activation": "swiglu_oai", "bias": True, "sinks": "learnable"},
)  # fmt: skip
