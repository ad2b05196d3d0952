"""Qwen3 with experts: Qwen3's form, where all or some MLPs are mixtures of them."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig, layer_list
from ..experts import of_each, read_experts, with_experts, write_experts
from ..family import Family, Weight
from ..fields import Fields, refused
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
    # Later versions of `transformers` write the other name.
    experts = given.take("num_local_experts", None, int) or given.need("num_experts")
    given.harmless("num_experts")
    common = read_common(given)
    return {
        **common,
        **read_rope(given),
        **read_experts(given, experts),
        "moe_layer_freq": _read_layers(given, common["num_layers"]),
        "qk_norm": True,
        "moe_ffn_hidden_size": given.need("moe_intermediate_size"),
        "moe_router_pre_softmax": not given.take("norm_topk_prob", False),
    }


def _read_layers(given: Fields, num_layers: int) -> str:
    """`moe_layer_freq`, by the rule of `transformers`."""
    step, dense = given.take("decoder_sparse_step", 1), given.take("mlp_only_layers", [])
    remedy = "Restore the model's config.json."
    if step < 1:
        raise refused("decoder_sparse_step", step, "at least 1", remedy)
    if not all(type(layer) is int for layer in dense):
        raise refused("mlp_only_layers", dense, "numbers of layers", remedy)
    layers = [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    if all(layers):
        return "1"
    if not any(layers):
        name, value = ("decoder_sparse_step", step) if step > num_layers else ("mlp_only_layers", dense)
        raise refused(name, value, "one that leaves a layer of experts", remedy)
    return layer_list(layers)


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
        "mlp_only_layers": [layer for layer, experts in enumerate(model.expert_layers) if not experts],
    }


def _weights(model: ModelConfig) -> list[Weight]:
    first = of_each(model, f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight")
    second = of_each(model, f"{_EXPERT}down_proj.weight")
    experts = with_experts(common_weights(model), f"{THEIR_MLP}gate.", (first, EXPERTS_GATE_UP), (second, EXPERTS))
    return [*experts, *qk_norms()]


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _read, _write, _weights)
