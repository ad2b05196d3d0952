"""Megatron's mixtures of experts, combined with context parallelism.

Ranks may hold unequal shares of a sequence. So an all-to-all, which supports any shares, sends tokens to experts, and
the router's losses are sums over tokens. Like the loss itself, they are divided by the number of tokens of the whole
step. Megatron's own losses assume equal shares and, with `calculate_per_token_loss`, shrink with every context- and
sequence-parallel rank.
"""

import re
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ..config import Config
from ..core.errors import refuse
from .version import as_builder, as_spec, copy_spec

# The name of an expert's parameter: local layers number modules, TransformerEngine's grouped layers number parameters.
_EXPERT = re.compile(r"local_experts\.(?P<module>\d+)\.(?P<rest>.+)$|(?P<linear>linear_fc[12]\.\D+)(?P<weight>\d+)$")
_SHARDED_DIM = {"linear_fc1": 0, "linear_fc2": 1}


def expert_settings(config: Config) -> dict[str, Any]:
    """Return Megatron's configuration of the model's experts; nothing for dense models."""
    model, par = config.model, config.parallelism
    if model.num_moe_experts is None:
        return {}
    same_names = (
        *("num_moe_experts", "moe_router_topk", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
        *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_dtype"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    )
    return {name: getattr(model, name) for name in same_names} | {
        "moe_ffn_hidden_size": model.expert_width,
        "moe_layer_freq": [int(experts) for experts in model.expert_layers],
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": par.expert_model_parallel_size,
        "expert_tensor_parallel_size": par.tensor_size_of_experts,
    }


def experts_spec(num_experts: int, transformer_engine: bool) -> Any:
    """Return Megatron's spec of a layer of experts, with `SummedLossRouter`.

    With TransformerEngine, one grouped product computes all experts of a rank.
    """
    spec = with_summed_losses(
        as_spec(get_moe_module_spec(transformer_engine, num_experts, moe_grouped_gemm=transformer_engine))
    )
    experts = as_spec(spec.submodules.experts)
    experts.module = type(f"Seeded{experts.module.__name__}", (SeededExperts, experts.module), {})
    spec.submodules.experts = as_builder(experts)
    return as_builder(spec)


def with_summed_losses(mlp: Any) -> Any:
    """Return a copy of an MLP's spec with `SummedLossRouter` in the place of Megatron's own router, if it has that."""
    if getattr(getattr(mlp, "submodules", None), "router", None) is not TopKRouter:
        return mlp
    mlp = copy_spec(mlp)
    mlp.submodules.router = SummedLossRouter
    return mlp


class SummedLossRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router with losses whose gradients do not depend on how ranks divide a sequence.

    Raises:
        ValueError: losses without `calculate_per_token_loss`, whose gradients would not be divided by all tokens.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if not config.calculate_per_token_loss and (self.is_aux_loss_enabled() or config.moe_z_loss_coeff is not None):
            remedy = "Set it, and sum the loss over tokens; or leave moe_aux_loss_coeff and moe_z_loss_coeff out."
            raise refuse("calculate_per_token_loss", False, "True with losses of a router", remedy)

    def _apply_aux_loss(
        self, probs: Tensor, scores: Tensor, routing: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        return self._add_balance_loss(probs, scores, routing, "aux_loss")

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores: Tensor, routing: Tensor, seq_length: int, bsz: int, with_padding_mask: bool = False
    ) -> Tensor:
        scores, routing = scores.reshape(seq_length, -1), routing.reshape(seq_length, -1)
        return self._add_balance_loss(probs, scores, routing, "seq_aux_loss")

    def _add_balance_loss(self, probs: Tensor, scores: Tensor, routing: Tensor, kind: str) -> Tensor:
        """Add the Switch Transformer's loss (equation 4), E * the sum of f_i * P_i over the E experts, times its
        coefficient and its number of tokens.

        scores, routing: `[tokens, sequences * E]` of this rank.
        """
        if not (coefficient := self.get_aux_loss_coeff(kind)):
            return probs
        counts = torch.cat([routing.sum(0), routing.new_full((1,), len(routing), dtype=torch.int64)])
        counts = reduce_from_tensor_model_parallel_region(counts, self.tp_cp_group)
        chosen, tokens = counts[:-1], counts[-1]
        # Gradients sum the tokens of a sequence over ranks, which cancels one factor of 1 / tokens².
        loss = (scores.sum(0) * chosen).sum() * (self.config.num_moe_experts * coefficient / self.topk) / tokens
        return MoEAuxLossAutoScaler.apply(probs, loss)  # type: ignore[no-any-return]

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Add the square of each token's log-sum-exp, times its coefficient."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        loss = torch.logsumexp(logits, dim=-1).square().sum() * coefficient
        return MoEAuxLossAutoScaler.apply(logits, loss)  # type: ignore[no-any-return]


class SeededExperts(torch.nn.Module):
    """Experts whose initial weights depend on their number in the layer; `experts_spec` derives a class from this one.

    Their weights, and the weights of later layers, are therefore the same at every expert-parallel size.
    """

    def __init__(self, num_local_experts: int, config: Any, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        seed = int(torch.randint(2**62, (1,)))  # all ranks of a stage share this stream
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            super().__init__(num_local_experts, config, *args, pg_collection=pg_collection, **kwargs)
            first = pg_collection.ep.rank() * num_local_experts
            for name, weight in self.named_parameters():
                if weight.ndim == 2:
                    torch.manual_seed(seed + int(expert_name(name, first).split(".")[1]) * 2 + ("linear_fc2" in name))
                    _init_shard(weight, name, config, pg_collection.expt_tp)
        for parameter in self.parameters():
            # No other tensor-parallel rank has a copy, because biases need whole experts: gradients are not summed over
            # these ranks (`finalize_model_grads`), and all of them count in the norm.
            # Megatron marks the second biases the other way round, and TransformerEngine's grouped layers mark none.
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        if config.add_bias_linear:
            for module in self.modules():
                if isinstance(module, RowParallelLinear):
                    # Megatron adds the bias in place, which autograd forbids if one rank's sum is its input.
                    module.register_forward_hook(lambda _module, _inputs, output: (output[0].clone(), output[1]))


def _init_shard(weight: Tensor, name: str, config: Any, group: Any) -> None:
    """Initialize the whole weight, and copy this rank's shard of it."""
    linear = next(each for each in _SHARDED_DIM if each in name)
    dim, first = _SHARDED_DIM[linear], linear == "linear_fc1"
    stride = 2 if first and config.gated_linear_unit else 1  # a rank has a part of the gate and one of the value
    shape = list(weight.shape)
    shape[dim] *= group.size()
    whole = torch.empty(shape, device=weight.device)
    (config.init_method if first else config.output_layer_init_method)(whole)
    parts = whole.chunk(stride * group.size(), dim)[group.rank() :: group.size()]
    weight.data.copy_(torch.cat(parts, dim))


def expert_name(name: str, first: int) -> str:
    """Return a parameter's name; an expert's becomes `…experts.NUMBER.…` with its number in the whole layer.

    first: the number of this rank's first expert.
    """
    match = _EXPERT.search(name)
    if match is None:
        return name
    number, rest = match["module"] or match["weight"], match["rest"] or match["linear"]
    before = name[: match.start()]
    return f"{before or 'experts.'}{first + int(number)}.{rest}"
