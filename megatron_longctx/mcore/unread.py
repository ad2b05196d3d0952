"""A linear layer whose output nobody reads: the gradients of its product, without the product.

When a layer is run again for its gradients, the last product of its MLP, a quarter of the layer's matrix work, would
only give what is known already to be the next layer's input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from ..kernels.no_grad import first_order


@contextmanager
def unread_output(linear: Any) -> Iterator[None]:
    """Inside, `linear` gives zeros, with the right gradients and messages; layers other than Megatron's own
    row-parallel one, whose gradients autograd adds up, run as they are."""
    plain = (
        isinstance(linear, RowParallelLinear)
        and not linear.gradient_accumulation_fusion
        and linear.weight.requires_grad
    )
    if not plain:
        yield
        return
    linear._forward_impl = _zeros  # hides the method
    try:
        yield
    finally:
        del linear._forward_impl


def _zeros(input: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return _Unread.apply(input, weight)  # type: ignore[no-any-return, no-untyped-call]


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """As Megatron computes them, to the bit."""
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        return grad.matmul(weight), grad.flatten(0, -2).t().matmul(x.flatten(0, -2))
