"""Qwen3 with experts: Qwen3's form, where every MLP is a mixture of them."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..experts import of_each, read_experts, with_experts, write_experts
from ..family import Family, Weight
from ..fields import Fields
from ..forms import EXPERTS, EXPERTS_GATE_UP
from ..rope import read_rope, write_rope
from .llama import THEIR_MLP, common_weights, read_common, write_common
from .qwen2 import full_attention_only
from .qwen3 import qk_norms

_EXPERT = f"{THEIR_MLP}experts.{{expert}}."


def _read(given: Fields) -> dict[str, Any]:
    full_attention_only(given)
    given.only("attention_bias", False)
    given.need("num_key_value_heads")
    for name, value in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        given.only(name, value, remedy="Models with dense MLPs between are not served.")
    # Later versions of `transformers` write the other name.
    experts = given.take("num_local_experts", None, int) or given.need("num_experts")
    given.harmless("num_experts")
    return {
        **read_common(given),
        **read_rope(given),
        **read_experts(given, experts),
        "qk_norm": True,
        "moe_ffn_hidden_size": given.need("moe_intermediate_size"),
        "moe_router_pre_softmax": not given.take("norm_topk_prob", False),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_common(model),
        **write_rope(model),
        **write_experts(model),
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": model.num_moe_experts,
        "moe_intermediate_size": model.expert_width,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _weights(model: ModelConfig) -> list[Weight]:
    first = of_each(model, f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight")
    second = of_each(model, f"{_EXPERT}down_proj.weight")
    experts = with_experts(common_weights(model), f"{THEIR_MLP}gate.", (first, EXPERTS_GATE_UP), (second, EXPERTS))
    return [*experts, *qk_norms()]


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _read, _write, _weights)
