"""Row-parallel layers whose sums over tensor-parallel ranks follow a policy: quantized or exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec
from torch import Tensor

from ..config import ReductionConfig
from ..core.errors import refuse
from ..core.kernels.no_grad import first_order
from ..lowbit.reduction import Reducer, ReductionPolicy
from .version import as_builder, copy_spec, mlp_spec

_OPERATIONS = {
    False: ("all_reduce", reduce_from_tensor_model_parallel_region),
    True: ("reduce_scatter", reduce_scatter_to_sequence_parallel_region),
}
"""The reducer's operation, and Megatron's exact one that sums in place; keyed by sequence parallelism."""


@dataclass
class RowReductions:
    """The policies of a model's row-parallel layers; layers of the same group and policy share a reducer."""

    output_projection: ReductionPolicy = field(default_factory=ReductionPolicy)  # of attention
    down_projection: ReductionPolicy = field(default_factory=ReductionPolicy)  # of dense MLPs
    in_training: bool = False  # whether policies also apply to modules in training mode
    _reducers: dict[tuple[dist.ProcessGroup, ReductionPolicy], Reducer] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(config: ReductionConfig) -> RowReductions:
        """Return the policies of a configuration."""
        output, down = (
            ReductionPolicy(mode, config.group_size, config.symmetric, config.min_kib, config.transport)
            for mode in (config.output_projection, config.down_projection)
        )
        return RowReductions(output, down, config.in_training)

    def reducer(self, group: dist.ProcessGroup, policy: ReductionPolicy) -> Reducer:
        key = (group, policy)
        if key not in self._reducers:
            self._reducers[key] = Reducer(group, policy)
        return self._reducers[key]


def with_reductions(layer: ModuleSpec, reductions: RowReductions) -> ModuleSpec:
    """Return a copy of a transformer layer's spec whose output and down projections follow `reductions`.

    Projections whose policy is not `none` become `ReducedRowParallelLinear`. In a spec of TransformerEngine's, torch
    then computes these projections. Weights keep their names.

    Raises:
        ValueError: a spec without a projection that has a policy, such as the MLP of experts.
    """
    layer = copy_spec(layer)
    for policy, name, part, linear in (
        (reductions.output_projection, "output_projection", "self_attention", "linear_proj"),
        (reductions.down_projection, "down_projection", "mlp", "linear_fc2"),
    ):
        if policy.mode == "none":
            continue
        inner: Any = mlp_spec(layer) if part == "mlp" else getattr(layer.submodules, part, None)
        if getattr(getattr(inner, "submodules", None), linear, None) is None:
            expected = f"none for a layer of {layer.module} without {part}.{linear}"
            raise refuse(f"reduction.{name}", policy.mode, expected, "Set it to none.")
        params = {"reductions": reductions, "policy": policy}
        inner = copy_spec(inner)
        setattr(inner.submodules, linear, ModuleSpec(module=ReducedRowParallelLinear, params=params))
        setattr(layer.submodules, part, as_builder(inner) if part == "mlp" else inner)
    return layer


class ReducedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's `RowParallelLinear` with a `Reducer` that sums its output over ranks.

    With sequence parallelism, the sum is reduce-scattered along the sequence; otherwise it is all-reduced. In training
    mode (`module.training`) this is Megatron's own layer, unless `reductions.in_training`. Then gradients pass as
    through the exact sum (a straight-through estimator).

    Args:
        reductions: the model's policies, which hold the reducers.
        policy: this layer's policy.
        The others are as for `RowParallelLinear`.

    Raises:
        ValueError: a layer of experts, an input that is not parallel, or CPU offloading.
    """

    def __init__(self, *args: Any, reductions: RowReductions, policy: ReductionPolicy, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in (
            ("is_expert", self.is_expert),
            ("input_is_parallel", not self.input_is_parallel),
            ("cpu_offloading", self.config.cpu_offloading),
        ):
            if value:
                raise refuse(key, getattr(self, key, value), "a plain parallel layer", "Set its reduction to none.")
        self._reductions = reductions
        self.set_policy(policy)

    def set_policy(self, policy: ReductionPolicy) -> None:
        """Sum by this policy in later calls; with `none` this is Megatron's own layer. All ranks call it."""
        self.reducer = self._reductions.reducer(self.tp_group, policy)

    def reducer_over(self, group: dist.ProcessGroup) -> Reducer:
        """Return the reducer of this layer's policy over another group."""
        return self._reductions.reducer(group, self.reducer.policy)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias or None) of `[s, b, input / n]`.

        The output is `[s, b, output]`, or `[s / n, b, output]` with sequence parallelism.
        """
        if self.reducer.policy.mode == "none" or (self.training and not self._reductions.in_training):
            output, bias = super().forward(input_)
            return output, bias
        partial = self._forward_impl(
            input=input_,
            weight=self.weight,
            bias=None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=None,
            grad_output_buffer=None,
        )
        name, exact = _OPERATIONS[self.sequence_parallel]
        if self.reducer.format(name, partial) is None:
            output = exact(partial, group=self.tp_group)
        else:
            output = _StraightThroughSum.apply(partial, self.reducer, self.sequence_parallel)  # type: ignore[no-untyped-call]
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None


class _StraightThroughSum(torch.autograd.Function):
    """The reducer's sum, with the gradient of the exact sum."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, reducer: Reducer, scatter: bool) -> Tensor:
        ctx.group, ctx.scatter = reducer.group, scatter
        return reducer.reduce_scatter(partial) if scatter else reducer.all_reduce(partial)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.scatter:
            grad = gather_from_sequence_parallel_region(grad, group=ctx.group)
        return grad, None, None
