"""Qwen3 with experts: Qwen3's form, with mixtures of experts in all or some layers."""

from typing import Any

from ...config import ModelConfig, layer_list
from .. import common
from ..common import PUBLISHED_MLP
from ..family import Family
from ..fields import RESTORE, Fields, refuse_field
from ..weights import Weight


def _read(fields: Fields) -> dict[str, Any]:
    common.full_attention_only(fields)
    fields.require("num_key_value_heads")
    keys = common.read(fields)
    return keys | read_experts(fields, keys["num_layers"], norm_topk_prob=False)


def read_experts(fields: Fields, num_layers: int, norm_topk_prob: bool) -> dict[str, Any]:
    """Read the fields of experts. norm_topk_prob: its default."""
    # Later versions of `transformers` write num_local_experts.
    experts = fields.get("num_local_experts", None, int) or fields.require("num_experts")
    fields.ignore("num_experts")
    return {
        **common.read_experts(fields, experts),
        "moe_layer_freq": _read_layers(fields, num_layers),
        "moe_ffn_hidden_size": fields.require("moe_intermediate_size"),
        "moe_router_pre_softmax": not fields.get("norm_topk_prob", norm_topk_prob),
    }


def _read_layers(fields: Fields, num_layers: int) -> str:
    """Return `moe_layer_freq` by the rule of `transformers`."""
    step, dense = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if step < 1:
        raise refuse_field("decoder_sparse_step", step, "at least 1", RESTORE)
    if not all(type(layer) is int for layer in dense):
        raise refuse_field("mlp_only_layers", dense, "numbers of layers", RESTORE)
    layers = [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    if all(layers):
        return "1"
    if not any(layers):
        name, value = ("decoder_sparse_step", step) if step > num_layers else ("mlp_only_layers", dense)
        raise refuse_field(name, value, "one that leaves a layer of experts", RESTORE)
    return layer_list(layers)


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model, which `Family.read` reads."""
    return {
        **common.write(model),
        **common.write_experts(model),
        "num_experts": model.num_moe_experts,
        "moe_intermediate_size": model.expert_width,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, experts in enumerate(model.expert_layers) if not experts],
    }


def weights(model: ModelConfig) -> list[Weight]:
    """Return the weights of a model."""
    experts = (f"{PUBLISHED_MLP}experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return [*common.with_separate_experts(model, f"{PUBLISHED_MLP}gate.", *experts), *common.qk_norms()]


FAMILY = Family(
    "qwen3_moe", ("Qwen3MoeForCausalLM",), _read, write, weights,
    constants={"attention_bias": False, "use_sliding_window": False}, keys={"qk_norm": True},
)  # fmt: skip
