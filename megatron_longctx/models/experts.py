"""What families have in common whose MLPs, or some of them, are mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from .family import Weight
from .fields import Fields
from .forms import Form

MLP = "decoder.layers.{layer}.mlp."
_DENSE, _EXPERTS = f"{MLP}linear_fc", f"{MLP}experts.experts.linear_fc"


def read_experts(given: Fields, experts: int) -> dict[str, Any]:
    """Keys of `ModelConfig` that these families share, for so many experts."""
    given.harmless("output_router_logits")
    return {
        "num_moe_experts": experts,
        "moe_router_topk": given.need("num_experts_per_tok"),
        "moe_aux_loss_coeff": given.take("router_aux_loss_coef", 0.001),
    }


def write_experts(model: ModelConfig) -> dict[str, Any]:
    """The fields that `read_experts` takes."""
    return {"num_experts_per_tok": model.moe_router_topk, "router_aux_loss_coef": model.moe_aux_loss_coeff}


def with_experts(
    weights: list[Weight], router: str, first: tuple[tuple[str, ...], Form], second: tuple[tuple[str, ...], Form]
) -> list[Weight]:
    """The weights of a model with dense MLPs, and of its layers of experts what is in the place of these.

    Args:
        weights: among them the norm before the MLP.
        router: names of its tensors begin so.
        first, second: published names of the experts' two products, and how these are put together.
    """
    norm = next(weight for weight in weights if weight.ours == f"{_DENSE}1.layer_norm_weight")
    return [
        *(replace(weight, of_experts=False) if weight.ours.startswith(_DENSE) else weight for weight in weights),
        Weight("decoder.layers.{layer}.pre_mlp_layernorm.weight", norm.theirs, norm.shape, of_experts=True),
        Weight(f"{MLP}router.weight", (f"{router}weight",), ("experts", "hidden"), of_experts=True),
        Weight(f"{_EXPERTS}1.weight", first[0], ("experts", "expert_gate_up", "hidden"), first[1], of_experts=True),
        Weight(f"{_EXPERTS}2.weight", second[0], ("experts", "hidden", "expert_ffn"), second[1], of_experts=True),
    ]


def of_each(model: ModelConfig, *names: str) -> tuple[str, ...]:
    """Names with an `{expert}`, for every expert."""
    return tuple(name.replace("{expert}", str(at)) for at in range(model.num_moe_experts or 0) for name in names)
