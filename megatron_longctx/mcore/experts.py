"""Megatron's mixtures of experts beside context parallelism.

Ranks may hold unequal shares of a sequence. Tokens therefore go to experts by all-to-all, which takes any shares, and
the router's losses are sums over tokens, which are divided, as the loss itself, by the tokens of the whole step.
Megatron's own assume equal shares and, with `calculate_per_token_loss`, shrink with every context- and
sequence-parallel rank.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ..config import Config
from .version import builder_of, spec_of

# Of an expert's parameter: local layers number modules, TransformerEngine's grouped ones parameters.
_NUMBERED = re.compile(r"local_experts\.(?P<module>\d+)\.(?P<rest>.+)$|(?P<linear>linear_fc[12]\.\D+)(?P<weight>\d+)$")
_PARTITIONED = {"linear_fc1": 0, "linear_fc2": 1}


def expert_settings(config: Config) -> dict[str, Any]:
    """Megatron's fields of the model's experts; none for dense models."""
    model, par = config.model, config.parallelism
    if model.num_moe_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_moe_experts,
        "moe_ffn_hidden_size": model.expert_width,
        "moe_layer_freq": [int(experts) for experts in model.expert_layers],
        "moe_router_topk": model.moe_router_topk,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_router_dtype": model.moe_router_dtype,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": par.expert_model_parallel_size,
        "expert_tensor_parallel_size": par.tensor_size_of_experts,
    }


def experts_spec(num_experts: int, transformer_engine: bool) -> Any:
    """Megatron's layer of experts with our router: grouped products where TransformerEngine is, else one by one."""
    spec = spec_of(get_moe_module_spec(transformer_engine, num_experts, moe_grouped_gemm=transformer_engine))
    spec.submodules.router = SummedLossRouter
    experts = spec_of(spec.submodules.experts)
    experts.module = type(f"Seeded{experts.module.__name__}", (SeededExperts, experts.module), {})
    spec.submodules.experts = builder_of(experts)
    return builder_of(spec)


class SummedLossRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router, whose losses have the same gradients however the ranks share a sequence."""

    def _apply_aux_loss(
        self, probs: Tensor, scores: Tensor, routing: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        return self._balanced(probs, scores, routing, "aux_loss", sequences=1)

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores: Tensor, routing: Tensor, seq_length: int, bsz: int, with_padding_mask: bool = False
    ) -> Tensor:
        scores, routing = scores.reshape(seq_length, -1), routing.reshape(seq_length, -1)
        return self._balanced(probs, scores, routing, "seq_aux_loss", sequences=bsz)

    def _balanced(self, probs: Tensor, scores: Tensor, routing: Tensor, kind: str, sequences: int) -> Tensor:
        """With the loss of the Switch Transformer (equation 4), E * sum of f_i * P_i over experts, times its
        coefficient and the tokens that it is over.

        Args:
            scores, routing: `[tokens, sequences * E]` of this rank.
        """
        if not (coefficient := self.get_aux_loss_coeff(kind)):
            return probs
        counts = torch.cat([routing.sum(0), routing.new_full((1,), len(routing), dtype=torch.int64)])
        counts = reduce_from_tensor_model_parallel_region(counts, self.tp_cp_group)
        chosen, tokens = counts[:-1], counts[-1]
        # The tokens of a sequence are summed over ranks by their gradients, and cancel against one of 1 / tokens².
        loss = (scores.sum(0) * chosen).sum() * (self.config.num_moe_experts * coefficient / self.topk) / tokens
        return MoEAuxLossAutoScaler.apply(probs, loss)  # type: ignore[no-any-return]

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """With the square of each token's log-sum-exp, times its coefficient."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        loss = torch.logsumexp(logits, dim=-1).square().sum() * coefficient
        return MoEAuxLossAutoScaler.apply(logits, loss)  # type: ignore[no-any-return]


class SeededExperts(torch.nn.Module):
    """Before any of Megatron's classes of experts: weights are drawn by an expert's number in the layer, so that they,
    and those of the layers behind, are the same at every expert-parallel size."""

    def __init__(self, num_local_experts: int, config: Any, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        seed = int(torch.randint(2**62, (1,)))  # of the stream that all ranks of a stage share
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            super().__init__(num_local_experts, config, *args, pg_collection=pg_collection, **kwargs)
            first = pg_collection.ep.rank() * num_local_experts
            for name, weight in self.named_parameters():
                if weight.ndim == 2:
                    torch.manual_seed(seed + int(numbered(name, first).split(".")[1]) * 2 + ("linear_fc2" in name))
                    _draw(weight, name, config, pg_collection.expt_tp)
        if config.add_bias_linear:
            for module in self.modules():
                if isinstance(module, RowParallelLinear):
                    module.register_forward_hook(_own)


def _own(module: torch.nn.Module, given: Any, found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Megatron adds the bias to the product in place, which autograd forbids where one rank's sum is its input."""
    return found[0].clone(), found[1]


def _draw(weight: Tensor, name: str, config: Any, group: Any) -> None:
    """This rank's part of a weight that is drawn whole."""
    linear = next(each for each in _PARTITIONED if each in name)
    dim, first = _PARTITIONED[linear], linear == "linear_fc1"
    stride = 2 if first and config.gated_linear_unit else 1  # a rank has a part of the gate, and one of what it gates
    shape = list(weight.shape)
    shape[dim] *= group.size()
    whole = torch.empty(shape, device=weight.device)
    (config.init_method if first else config.output_layer_init_method)(whole)
    parts = whole.chunk(stride * group.size(), dim)[group.rank() :: group.size()]
    weight.data.copy_(torch.cat(parts, dim))


def numbered(name: str, first: int) -> str:
    """The name of a parameter; of one of an expert `…experts.NUMBER.…` with its number among all of the layer.

    first: number of this rank's first expert.
    """
    found = _NUMBERED.search(name)
    if found is None:
        return name
    number, rest = found["module"] or found["weight"], found["rest"] or found["linear"]
    before = name[: found.start()]
    return f"{before or 'experts.'}{first + int(number)}.{rest}"
