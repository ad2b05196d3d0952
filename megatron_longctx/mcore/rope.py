"""RoPE for any layout, applied to queries and keys just before attention.

Megatron's own application reads and writes them five times over without TransformerEngine, and rounds cosines to the
model's dtype; here one fused pass computes in fp32 and rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from ..errors import refuse
from ..kernels.no_grad import first_order
from ..kernels.rotate import rotate
from ..models.rope import Frequencies
from ..schedules.mask import Window
from .pack import UNBOUNDED, Pack
from .sequence import ShardedSequence


@dataclass(frozen=True)
class Rotation:
    """The rotation of one rank's tokens.

    cos, sin: fp32 `[s, r / 2]`: of the angle of every token and pair of elements, times what scaling stretches them by;
    r is at most the head dimension, and elements from r on stay as they are. interleaved: elements (2i, 2i + 1) make a
    pair, otherwise (i, i + r / 2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """`[s, b, h, d]` to the same, contiguous, in x's dtype; differentiable in x."""
        return _Rotate.apply(x, self.cos, self.sin, self.interleaved)  # type: ignore[no-any-return, no-untyped-call]

    def of_both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys in one go, without gradients: each `[s, ..., d]` to the same, contiguous, in its dtype."""
        q, k = rotate((q, k), self.cos, self.sin, self.interleaved)
        return q, k


@dataclass(frozen=True)
class Rotations:
    """Of layers that see everything, and of those with a window, which may turn tokens otherwise."""

    everywhere: Rotation
    windowed: Rotation

    def of(self, window: Window) -> Rotation:
        return self.everywhere if window == UNBOUNDED else self.windowed


class ShardedRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
    """Replaces `GPTModel.rotary_pos_emb`, which knows the zigzag layout of even lengths only.

    It tells the sequence how tokens turn, whose core attention turns them; called by the model it returns None, so that
    Megatron's layers rotate nothing themselves.

    Args:
        original: what it replaces.
        sequence: None: one that is told otherwise.
        everywhere: how fast tokens turn; None: as `original` says.
        windowed: the same in layers with a window; None: as in the others.

    Raises:
        ValueError: an embedding of another kind, whose angles or sizes its own methods say (YaRN, multimodal), or a
            sequence that a model of other angles has.
    """

    def __init__(
        self,
        original: RotaryEmbedding,
        sequence: ShardedSequence | None,
        everywhere: Frequencies | None = None,
        windowed: Frequencies | None = None,
    ) -> None:
        _refuse_other_kinds(original)
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = original.rotary_interleaved
        self.seq_len_interpolation_factor = original.seq_len_interpolation_factor
        self.inv_freq = original.inv_freq
        self.cp_group = original.cp_group
        self._frequencies: tuple[Frequencies, ...]  # of layers that see everything, of those with a window
        if isinstance(original, ShardedRotaryEmbedding):
            self._frequencies = original._frequencies
        else:
            found = everywhere or Frequencies(original.inv_freq), *([windowed] if windowed is not None else [])
            apart = len(found) > 1 and not found[0].equals(found[1])
            self._frequencies = tuple(x.to(original.inv_freq.device) for x in found[: 1 + apart])
        if sequence is not None:
            sequence.turn_by(self)

    def equals(self, other: Any) -> bool:
        """Whether tokens turn alike by both."""
        return (
            isinstance(other, ShardedRotaryEmbedding)
            and len(other._frequencies) == len(self._frequencies)
            and all(x.equals(own) for x, own in zip(other._frequencies, self._frequencies, strict=True))
            and other.rotary_interleaved == self.rotary_interleaved
            and other.seq_len_interpolation_factor == self.seq_len_interpolation_factor
        )

    def of_pack(self, pack: Pack) -> Rotations:
        """Of this rank's tokens, by where they lie in their documents."""
        return self.rotations(pack.positions(self.inv_freq.device))

    def rotations(self, positions: Tensor) -> Rotations:
        """Of tokens at these positions, int64 `[s]`."""
        turns = [self._rotation(positions, found) for found in self._frequencies]
        return Rotations(turns[0], turns[-1])

    def _rotation(self, positions: Tensor, found: Frequencies) -> Rotation:
        """Angles in fp64, as at a million tokens those in fp32 are off by 0.03 rad."""
        exact = positions.double()
        if self.seq_len_interpolation_factor is not None:
            exact = exact * (1 / self.seq_len_interpolation_factor)
        angles = torch.outer(exact, found.inverse.double())
        cos, sin = angles.cos(), angles.sin()
        if found.stretch != 1:
            cos, sin = cos * found.stretch, sin * found.stretch
        return Rotation(cos.float(), sin.float(), self.rotary_interleaved)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> None:
        """Nothing to turn by outside of core attention."""


def _refuse_other_kinds(original: torch.nn.Module) -> None:
    """Subclasses may choose other frequencies; what is made of these is worked out here."""
    if not isinstance(original, ShardedRotaryEmbedding) and any(
        getattr(type(original), name, None) is not getattr(RotaryEmbedding, name)
        for name in ("forward", "get_emb", "get_freqs_non_repeated")
    ):
        raise refuse(
            "rotary_pos_emb",
            type(original).__name__,
            "Megatron's RotaryEmbedding (position_embedding_type=rope)",
            "Multimodal positions are not served; YaRN is, as ShardedRotaryEmbedding's own frequencies "
            "(model.rope_scaling), and so are rope_scaling and seq_len_interpolation_factor.",
        )


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotate((x,), cos, sin, interleaved)[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[:1], cos, sin, ctx.interleaved, inverse=True)[0], None, None, None
