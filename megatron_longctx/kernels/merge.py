"""Merging partial attention: results over disjoint key sets into the result over their union.

With lse l = log of the summed exponentials, the union of (o_a, l_a) and (o_b, l_b) is
`l = logaddexp(l_a, l_b)`, `o = o_a * sigmoid(l_a - l_b) + o_b * sigmoid(l_b - l_a)`, which cannot overflow.
"""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_longctx.kernels.strides import few_rows

logger = logging.getLogger(__name__)

_ACCUMULATORS = (torch.float32, torch.float64)
_FUSED_PARTIALS = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def merge_into(acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge one partial into the accumulators, in place.

    (0, -inf) is the neutral element on both sides: start accumulators there. Two empty sets give (0, -inf).

    Args:
        acc_out: `[s, b, h, d]` fp32 or fp64, any strides (e.g. the rows of a larger accumulator).
        acc_lse: `[s, b, h]`, the dtype of acc_out, any strides.
        out: `[s, b, h, d]`, any float dtype and strides; 0 wherever lse is -inf.
        lse: `[s, b, h]`, any strides.

    Raises:
        ValueError: shapes, accumulator dtypes or devices do not fit.
    """
    _check(acc_out, acc_lse, out, lse)
    if acc_out.numel() == 0:
        return
    fused = _fused_merge() if acc_out.is_cuda and _fusable(acc_out, out, lse) else None
    (fused or merge_into_torch)(acc_out, acc_lse, out, lse)


@torch.no_grad()
def merge_into_torch(acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """`merge_into` in plain PyTorch: the reference, and the way on CPU. Arguments are not checked."""
    new = lse.to(acc_lse.dtype)
    # With an empty partial the difference is -inf, also where the accumulator is empty too (-inf minus -inf is NaN).
    difference = torch.where(new == -torch.inf, -torch.inf, new - acc_lse)
    acc_out.lerp_(out.to(acc_out.dtype), torch.sigmoid(difference).unsqueeze(-1))
    acc_lse.copy_(torch.maximum(acc_lse, new) - logsigmoid(difference.abs()))


def _check(acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    if acc_out.ndim != 4 or out.shape != acc_out.shape or not (acc_lse.shape == lse.shape == acc_out.shape[:3]):
        raise ValueError(
            f"acc_out {tuple(acc_out.shape)}, acc_lse {tuple(acc_lse.shape)}, out {tuple(out.shape)}, "
            f"lse {tuple(lse.shape)}: expected [s, b, h, d] and [s, b, h] of equal sizes."
        )
    if acc_out.dtype not in _ACCUMULATORS or acc_lse.dtype != acc_out.dtype:
        raise ValueError(
            f"acc_out is {acc_out.dtype} and acc_lse {acc_lse.dtype}; accumulate both in float32 (or both in float64)."
        )
    if not acc_out.device == acc_lse.device == out.device == lse.device:
        raise ValueError(
            f"acc_out is on {acc_out.device}, acc_lse on {acc_lse.device}, out on {out.device}, lse on {lse.device}; "
            "move them to one device."
        )


def _fusable(acc_out: Tensor, out: Tensor, lse: Tensor) -> bool:
    """What the fused kernel takes: fp32 accumulators, rows numbered in 32 bits, heads with elements side by side."""
    dtypes = acc_out.dtype == lse.dtype == torch.float32 and out.dtype in _FUSED_PARTIALS
    return dtypes and few_rows(out) and acc_out.stride(-1) == 1 and out.stride(-1) == 1


@functools.cache
def _fused_merge() -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    try:
        from megatron_longctx.kernels.merge_triton import merge_into_triton
    except ImportError as error:
        logger.warning("merging attention in plain PyTorch, which is slower: triton cannot be imported (%s)", error)
        return None
    return merge_into_triton
