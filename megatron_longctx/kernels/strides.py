"""Strides as the fused kernels take them."""

from torch import Tensor


def row_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of all dimensions but the last; 0 for those of size 1, whose only index is 0.

    Triton compiles a kernel anew where a stride begins or ceases to be 1 or a multiple of 16, and a dimension of size 1
    may have any stride.
    """
    return tuple(stride if size > 1 else 0 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True))
