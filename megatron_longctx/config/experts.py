"""Mixtures of experts: the keys `model.num_moe_experts` and `model.moe_*`, and what they may be together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ..errors import refuse
from .bounds import check_is, choice, number, text

if TYPE_CHECKING:
    from .parallelism import ParallelismConfig
    from .tree import Config, ModelConfig

_WITHOUT = "with model.num_moe_experts=null"


@dataclass(frozen=True)
class ExpertKeys:
    """Megatron's fields, under its names. Tokens are never dropped."""

    num_moe_experts: int | None = number(None, 2, 10_000)  # experts per layer; null: all MLPs are dense
    moe_ffn_hidden_size: int | None = number(None, 1, 10**7)  # width inside one expert; null: ffn_hidden_size
    moe_router_topk: int = number(2, 1, 10_000)  # experts per token
    # One layer of experts in each moe_layer_freq, the first one; or a list of all layers, 1 with experts and 0 dense.
    moe_layer_freq: str = text(
        "1",
        "at least 1 and at most 10,000, or a list such as [0,1,1]",
        r"[1-9][0-9]{0,3}|10000|\[[01](, ?[01])*\]",
        most=10_000,
    )
    # number of first layers without experts; moe_layer_freq counts from the layer after them
    moe_first_dense_layers: int = number(0, 0, 10_000)
    # Width of the MLP that every token uses in addition to its experts, of all shared experts together. null:
    # none.
    moe_shared_expert_intermediate_size: int | None = number(None, 1, 10**7)
    moe_router_pre_softmax: bool = False  # weights are the softmax over all experts instead of over the chosen ones
    # Factor for the weights of experts; null: 1.
    moe_router_topk_scaling_factor: float | None = number(None, 0, 1e6, above=True)
    # How experts are kept equally busy: by a loss over each micro-batch (aux_loss) or over each sequence
    # (seq_aux_loss).
    moe_router_load_balancing_type: str = choice("aux_loss", ("none", "aux_loss", "seq_aux_loss"))
    moe_aux_loss_coeff: float = number(0.01, 0, 1e6)
    # weight of a loss that keeps router logits small; null: no such loss
    moe_z_loss_coeff: float | None = number(None, 0, 1e6, above=True)
    moe_router_dtype: str | None = choice(None, ("fp32", "fp64"))  # precision of the router; null: the model's

    @property
    def expert_width(self) -> int:
        """Of one expert's MLP."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size  # type: ignore[attr-defined]

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Of every layer of the model, whether its MLP is a mixture of experts."""
        layers: int = self.num_layers  # type: ignore[attr-defined]
        if self.num_moe_experts is None:
            return (False,) * layers
        if self.moe_layer_freq.startswith("["):
            return tuple(each == "1" for each in self.moe_layer_freq if each in "01")
        first, interval = self.moe_first_dense_layers, int(self.moe_layer_freq)
        return tuple(i >= first and (i - first) % interval == 0 for i in range(layers))


def layer_list(experts: Iterable[bool]) -> str:
    """`expert_layers` as the list that `moe_layer_freq` takes."""
    return f"[{','.join(str(int(each)) for each in experts)}]"


def check_experts(model: ModelConfig) -> None:
    """Refuse keys of experts that say nothing without others, and sizes that do not fit each other.

    Raises:
        ValueError: names the key and value, what was expected and what to do.
    """
    experts, topk = model.num_moe_experts, model.moe_router_topk
    if experts is None:
        remedy = "Set model.num_moe_experts: without experts nothing reads it."
        for key in fields(ExpertKeys):
            check_is(f"model.{key.name}", getattr(model, key.name), key.default, _WITHOUT, remedy)
        return
    if topk > experts:
        raise refuse("model.moe_router_topk", topk, f"at most model.num_moe_experts={experts}", "Lower it.")
    if topk == 1 and not model.moe_router_pre_softmax:
        remedy = "The softmax over one expert is 1, whatever the router says."
        raise refuse("model.moe_router_pre_softmax", False, "true with model.moe_router_topk=1", remedy)
    _check_layers(model)


def _check_layers(model: ModelConfig) -> None:
    first, given = model.moe_first_dense_layers, model.moe_layer_freq
    if given.startswith("["):
        if (count := len(model.expert_layers)) != model.num_layers:
            expected = f"model.num_layers={model.num_layers} numbers, not {count}"
            raise refuse("model.moe_layer_freq", given, expected, "Say 0 or 1 of every layer.")
        if first:
            expected = "0 with a list in model.moe_layer_freq"
            raise refuse("model.moe_first_dense_layers", first, expected, "The list says it of every layer.")
        if not any(model.expert_layers):
            remedy = "Set model.num_moe_experts=null for a dense model."
            raise refuse("model.moe_layer_freq", given, "a 1 in the list", remedy)
    elif not any(model.expert_layers):
        expected = f"less than model.num_layers={model.num_layers}"
        raise refuse("model.moe_first_dense_layers", first, expected, "Lower it.")


def check_expert_parallelism(config: Config) -> None:
    """Refuse experts that these ranks cannot share.

    Raises:
        ValueError: as `check_experts`.
    """
    model, par = config.model, config.parallelism
    tp, ep, etp = par.tensor_parallel_size, par.expert_model_parallel_size, par.expert_tensor_parallel_size
    if model.num_moe_experts is None:
        remedy = "Set model.num_moe_experts, or leave it."
        check_is("parallelism.expert_model_parallel_size", ep, 1, _WITHOUT, remedy)
        check_is("parallelism.expert_tensor_parallel_size", etp, None, _WITHOUT, remedy)
        return
    _check_shares(par, model.num_moe_experts, model.expert_width)
    if tp > 1:
        beside = "with experts and parallelism.tensor_parallel_size > 1"
        remedy = "Megatron's experts train with it alone."
        check_is("parallelism.sequence_parallel", par.sequence_parallel, True, beside, remedy)
    if par.tensor_size_of_experts > 1 and model.bias:
        expected = "1 with model.bias=true"
        raise refuse("parallelism.expert_tensor_parallel_size", etp, expected, "Megatron shards no biases of experts.")
    tile, reduction = config.recompute.mlp_tile_tokens, config.reduction.down_projection
    check_is("recompute.mlp_tile_tokens", tile, None, "with experts", "Only dense MLPs have tiles.")
    check_is("reduction.down_projection", reduction, "none", "with experts", "Only dense MLPs have it.")


def _check_shares(par: ParallelismConfig, experts: int, width: int) -> None:
    tp, ep, etp = par.tensor_parallel_size, par.expert_model_parallel_size, par.tensor_size_of_experts
    if experts % ep:
        expected = f"a divisor of model.num_moe_experts={experts}"
        raise refuse("parallelism.expert_model_parallel_size", ep, expected, "Ranks hold equally many experts.")
    if width % etp:
        expected = f"a divisor of {width}, an expert's width (model.moe_ffn_hidden_size, else ffn_hidden_size)"
        raise refuse("parallelism.expert_tensor_parallel_size", etp, expected, "Change one of them.")
    if ep == 1 and etp != tp:
        expected = f"null or {tp}, the tensor-parallel size, with parallelism.expert_model_parallel_size=1"
        remedy = "Megatron would not sum the gradients of experts that tensor-parallel ranks hold whole."
        raise refuse("parallelism.expert_tensor_parallel_size", etp, expected, remedy)
