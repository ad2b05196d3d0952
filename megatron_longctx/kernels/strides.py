"""Strides and sizes as the fused kernels take them."""

from torch import Tensor

_MOST_ROWS = 2048
"""Of one program, at most."""


def row_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of all dimensions but the last; 0 for those of size 1, whose only index is 0.

    Triton compiles a kernel anew where a stride begins or ceases to be 1 or a multiple of 16, and a dimension of size 1
    may have any stride.
    """
    sizes, strides = x.shape, x.stride()
    return tuple([strides[i] if sizes[i] > 1 else 0 for i in range(len(strides) - 1)])


def few_rows(x: Tensor) -> bool:
    """Whether the rows of `[s, b, h, d]` are counted in 32 bits: those that the last program has too many as well."""
    return x.shape[:3].numel() <= 2**31 - _MOST_ROWS
