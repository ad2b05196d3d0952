"""gpt-oss: experts with biases and a clamped SwiGLU, sinks, windows in every other layer."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..experts import MLP, read_experts, with_experts, write_experts
from ..family import Family, Weight
from ..fields import Fields, refused
from ..forms import EXPERT_COLUMNS, EXPERT_PAIRS
from ..rope import read_rope, write_rope
from ..windows import layer_types, read_windows, sliding_window
from .llama import (
    ATTENTION,
    THEIR_ATTENTION,
    THEIR_MLP,
    common_weights,
    qkv_bias,
    read_common,
    write_common,
)

_FUNCTION = {"activation": "swiglu_oai", "bias": True, "sinks": "learnable"}
_EXPERTS = f"{THEIR_MLP}experts."


def _read(given: Fields) -> dict[str, Any]:
    given.only("attention_bias", True)
    given.only("swiglu_alpha", 1.702)
    given.only("swiglu_limit", 7.0)
    for name in ("head_dim", "num_key_value_heads"):  # defaults of `transformers` are those of one size
        given.need(name)
    common = read_common(given, norm_epsilon=1e-5)
    experts = read_experts(given, given.need("num_local_experts"))
    given.only("experts_per_token", experts["moe_router_topk"])
    given.harmless("initial_context_length")  # as in rope_scaling
    if not (given.has("rope_scaling") or given.has("rope_parameters")):
        expected = "an object: without it, `transformers` takes the scaling of one size"
        raise refused("rope_scaling", None, expected, "Restore the model's config.json.")
    types = given.take("layer_types", None, list)
    if types is None or len(types) != common["num_layers"]:
        expected = f"{common['num_layers']}, as num_hidden_layers"
        raise refused("layer_types", types, expected, "Restore the model's config.json.")
    windows = read_windows(given.take("sliding_window", None, int), types)
    return {**common, **read_rope(given, default_base=150_000.0), **windows, **experts, **_FUNCTION}


def _write(model: ModelConfig) -> dict[str, Any]:
    rope = write_rope(model)
    return {
        **write_common(model),
        **rope,
        **write_experts(model),
        "rope_scaling": rope["rope_scaling"] or {"rope_type": "default"},
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "num_local_experts": model.num_moe_experts,
        "sliding_window": sliding_window(model),
        "layer_types": layer_types(model),
    }


def _weights(model: ModelConfig) -> list[Weight]:
    first, second = f"{_EXPERTS}gate_up_proj", f"{_EXPERTS}down_proj"
    ours = f"{MLP}experts.experts.linear_fc"
    return [
        *with_experts(
            common_weights(model), f"{THEIR_MLP}router.", ((first,), EXPERT_PAIRS), ((second,), EXPERT_COLUMNS)
        ),
        qkv_bias(),
        Weight(f"{ATTENTION}linear_proj.bias", (f"{THEIR_ATTENTION}o_proj.bias",), ("hidden",)),
        Weight(f"{ATTENTION}core_attention.softmax_offset", (f"{THEIR_ATTENTION}sinks",), ("heads",)),
        Weight(f"{MLP}router.bias", (f"{THEIR_MLP}router.bias",), ("experts",)),
        Weight(f"{ours}1.bias", (f"{first}_bias",), ("experts", "expert_gate_up"), EXPERT_PAIRS),
        Weight(f"{ours}2.bias", (f"{second}_bias",), ("experts", "hidden")),
    ]


FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), _read, _write, _weights)
