"""RoPE: turning pairs of elements of queries and keys by angles, in one pass over memory.

Plain operations read and write their tensors several times over, and what `torch.compile` makes of them is made for one
shape: prompts have a new one every time.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_longctx.kernels.fused import fused

_fused = partial(fused, __name__, "RoPE")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def rotate(
    tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool = False, inverse: bool = False
) -> list[Tensor]:
    """Turn tensors of the same tokens, on GPUs two of them by one kernel.

    Args:
        tensors: one or two `[s, b, h, d]`, or `[s, b, g, h / g, d]` (heads in groups), of one dtype, any strides.
        cos, sin: fp32 `[s, r / 2]`, contiguous: of the angle of every token and pair of elements; r <= d, and elements
            from r on stay as they are.
        interleaved: elements (2i, 2i + 1) make a pair, otherwise (i, i + r / 2).
        inverse: turn back: what gradients need.

    Returns:
        of the same shapes and dtype, contiguous; computed in fp32 (or the tensors' own precision, if higher) and
        rounded once.
    """
    x = tensors[0]
    twin = _fused() if x.is_cuda and _fusable(tensors, cos, sin) else None
    turned: list[Tensor] = (twin.rotate_triton if twin else rotate_torch)(tensors, cos, sin, interleaved, inverse)
    return turned


def rotate_torch(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> list[Tensor]:
    """`rotate` in plain PyTorch: the reference, and the way on CPU."""
    return [_rotated(x, cos, -sin if inverse else sin, interleaved) for x in tensors]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    spread = (slice(None), *[None] * (x.ndim - 2))
    cos, sin = cos[spread], sin[spread]
    turned, rest = x[..., : 2 * cos.shape[-1]].to(torch.promote_types(x.dtype, cos.dtype)), x[..., 2 * cos.shape[-1] :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1).contiguous()


def _fusable(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor) -> bool:
    """What the fused kernel takes."""
    angles = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    return angles and all(x.dtype in _DTYPES and x.stride(-1) == 1 and x.numel() for x in tensors)
