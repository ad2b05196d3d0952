"""RoPE for any layout, applied to queries and keys just before attention.

Megatron's own application reads and writes them five times over without TransformerEngine, and rounds cosines to the
model's dtype; here one fused pass computes in fp32 and rounds once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from .sequence import ShardedSequence

_SHAPES: set[tuple[Any, ...]] = set()
_SHAPES_OF_BOTH: set[tuple[Any, ...]] = set()
_MOST_SHAPES = 6


@dataclass(frozen=True)
class Rotation:
    """The rotation of one rank's tokens.

    cos, sin: fp32 `[s, r / 2]`: of the angle of every token and pair of elements; r is at most the head dimension, and
    elements from r on stay as they are. interleaved: elements (2i, 2i + 1) make a pair, otherwise (i, i + r / 2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """`[s, b, h, d]` to the same, contiguous, in x's dtype; differentiable in x."""
        return _Rotate.apply(x, self.cos, self.sin, self.interleaved)  # type: ignore[no-any-return, no-untyped-call]

    def of_both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys in one go, without gradients: each `[s, ..., d]` to the same, contiguous, in its dtype."""
        return _turn_both(q, k, self.cos, self.sin, self.interleaved)


class ShardedRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
    """Replaces `GPTModel.rotary_pos_emb`, which knows the zigzag layout of even lengths only.

    The model calls it before its layers; it leaves their `Rotation` with the sequence, whose core attention applies it,
    and returns None, so that Megatron's layers rotate nothing themselves.
    """

    def __init__(self, original: RotaryEmbedding, sequence: ShardedSequence) -> None:
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = original.rotary_interleaved
        self.seq_len_interpolation_factor = original.seq_len_interpolation_factor
        self.inv_freq = original.inv_freq
        self.cp_group = original.cp_group
        self._sequence = sequence
        self._made: tuple[int, Rotation] | None = None

    def rotation(self) -> Rotation:
        """Of this rank's tokens; angles in fp64, as at a million tokens those in fp32 are off by 0.03 rad."""
        positions = self._sequence.positions(self.inv_freq.device).double()
        if self.seq_len_interpolation_factor is not None:
            positions *= 1 / self.seq_len_interpolation_factor
        angles = torch.outer(positions, self.inv_freq.double())
        return Rotation(angles.cos().float(), angles.sin().float(), self.rotary_interleaved)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> None:
        """Leave the rotation with the sequence; computed once per sequence length."""
        length = self._sequence.length
        if self._made is None or self._made[0] != length:
            self._made = (length, self.rotation())
        self._sequence.rotation = self._made[1]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, -sin, ctx.interleaved), None, None, None


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


def _both_rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


@functools.cache
def _compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=dynamic)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`_rotated`, on GPUs as one kernel."""
    if not x.is_cuda:
        return _rotated(x, cos, sin, interleaved)
    shape = (x.shape, x.stride(), x.dtype, interleaved)
    return _compiled(_rotated, _is_rare(shape, _SHAPES))(x, cos, sin, interleaved)  # type: ignore[no-any-return]


def _turn_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """`_both_rotated`, on GPUs by one call of what is compiled: at few tokens it takes the host longer than kernels
    take the GPU."""
    if not q.is_cuda:
        return _both_rotated(q, k, cos, sin, interleaved)
    shape = (q.shape, q.stride(), k.shape, k.stride(), q.dtype, interleaved)
    rare = _is_rare(shape, _SHAPES_OF_BOTH)
    return _compiled(_both_rotated, rare)(q, k, cos, sin, interleaved)  # type: ignore[no-any-return]


def _is_rare(shape: tuple[Any, ...], seen: set[tuple[Any, ...]]) -> bool:
    """Whether to take kernels made for all shapes. Those made for one are five times as fast, but torch.compile gives
    up after 8 variants of a function."""
    if shape not in seen and len(seen) < _MOST_SHAPES:
        seen.add(shape)
    return shape not in seen
