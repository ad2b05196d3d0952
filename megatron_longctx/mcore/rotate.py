"""RoPE: the rotation of pairs of elements of queries and keys, in one pass over memory.

Plain operations read and write their tensors several times. `torch.compile` would compile them for one shape, and every
prompt has a new one.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..core.kernels.fused import load_fused

_fused = partial(load_fused, __name__, "RoPE")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def rotate(
    tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool = False, inverse: bool = False
) -> list[Tensor]:
    """Rotate one or two tensors of the same tokens, on GPUs in one kernel.

    Args:
        tensors: one or two `[s, b, h, d]`, or `[s, b, g, h / g, d]` (heads in groups), of one dtype, any strides.
        cos, sin: fp32 `[s, r / 2]`, contiguous, for every token and pair of elements; r <= d, and elements from r on
            are copied unchanged.
        interleaved: elements (2i, 2i + 1) form a pair, otherwise (i, i + r / 2).
        inverse: rotate by the negative angles, as gradients need it.

    Returns:
        contiguous tensors like these, computed in fp32 (or the tensors' precision, if higher) and rounded once.
    """
    x = tensors[0]
    impl = _fused() if x.is_cuda and _fusable(tensors, cos, sin) else None
    rotated: list[Tensor] = (impl.rotate_triton if impl else rotate_torch)(tensors, cos, sin, interleaved, inverse)
    return rotated


def rotate_torch(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> list[Tensor]:
    """Run `rotate` in plain PyTorch: the reference, and the way on CPU."""
    return [_rotated(x, cos, -sin if inverse else sin, interleaved) for x in tensors]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    spread = (slice(None), *[None] * (x.ndim - 2))
    cos, sin = cos[spread], sin[spread]
    front, rest = x[..., : 2 * cos.shape[-1]].to(torch.promote_types(x.dtype, cos.dtype)), x[..., 2 * cos.shape[-1] :]
    if interleaved:
        a, b = front[..., 0::2], front[..., 1::2]
        front = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = front.chunk(2, -1)
        front = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((front.to(x.dtype), rest), -1).contiguous()


def _fusable(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor) -> bool:
    angles = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    return angles and all(x.dtype in _DTYPES and x.stride(-1) == 1 and x.numel() for x in tensors)
