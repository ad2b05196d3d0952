"""RoPE for any layout, applied to queries and keys just before attention.

Without TransformerEngine, Megatron's own RoPE reads and writes them five times, and rounds cosines to the model's
dtype. Here one fused pass computes in fp32 and rounds once.
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

    Attributes:
        cos, sin: fp32 `[s, r / 2]`, of the angle of every token and pair of elements, times the scaling's stretch. r is
            at most the head dimension; elements from r on are not rotated.
        interleaved: whether elements (2i, 2i + 1) form a pair; otherwise (i, i + r / 2) do.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate `[s, b, h, d]`, differentiably; return it contiguous, in x's dtype."""
        return _Rotate.apply(x, self.cos, self.sin, self.interleaved)  # type: ignore[no-any-return, no-untyped-call]

    def rotate_both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys `[s, ..., d]` in one launch, without gradients; return each contiguous."""
        q, k = rotate((q, k), self.cos, self.sin, self.interleaved)
        return q, k


@dataclass(frozen=True)
class Rotations:
    """The rotations of layers with full attention and of layers with a window, which may differ."""

    full: Rotation
    windowed: Rotation

    def of(self, window: Window) -> Rotation:
        return self.full if window == UNBOUNDED else self.windowed


class ShardedRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
    """RoPE for any layout, in place of `GPTModel.rotary_pos_emb`, which supports only zigzag of even lengths.

    It gives the sequence its rotations, which core attention applies. When the model calls it, it returns None, so
    Megatron's layers rotate nothing themselves.

    Args:
        original: the embedding that it replaces.
        sequence: the model's sequence; None if rotations do not depend on one.
        full: frequencies of layers with full attention; None for those of `original`.
        windowed: frequencies of layers with a window; None for those of the other layers.

    Raises:
        ValueError: an embedding that overrides the computation of angles (YaRN, multimodal), or a sequence of a model
            with other angles.
    """

    def __init__(
        self,
        original: RotaryEmbedding,
        sequence: ShardedSequence | None,
        full: Frequencies | None = None,
        windowed: Frequencies | None = None,
    ) -> None:
        _refuse_other_kinds(original)
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = original.rotary_interleaved
        self.seq_len_interpolation_factor = original.seq_len_interpolation_factor
        self.inv_freq = original.inv_freq
        self.cp_group = original.cp_group
        self._frequencies: tuple[Frequencies, ...]  # one, or two if layers with a window have others
        if isinstance(original, ShardedRotaryEmbedding):
            self._frequencies = original._frequencies
        else:
            frequencies = [full or Frequencies(original.inv_freq)]
            if windowed is not None and not frequencies[0].equals(windowed):
                frequencies.append(windowed)
            self._frequencies = tuple(x.to(original.inv_freq.device) for x in frequencies)
        if sequence is not None:
            sequence.set_rope(self)

    def equals(self, other: Any) -> bool:
        """Whether both rotate by the same angles."""
        return (
            isinstance(other, ShardedRotaryEmbedding)
            and len(other._frequencies) == len(self._frequencies)
            and all(x.equals(own) for x, own in zip(other._frequencies, self._frequencies, strict=True))
            and other.rotary_interleaved == self.rotary_interleaved
            and other.seq_len_interpolation_factor == self.seq_len_interpolation_factor
        )

    def rotations_of(self, pack: Pack) -> Rotations:
        """Return the rotations of this rank's tokens, at their positions inside their documents."""
        return self.rotations(pack.positions(self.inv_freq.device))

    def rotations(self, positions: Tensor) -> Rotations:
        """Return the rotations of tokens at these positions, int64 `[s]`."""
        rotations = [self._rotation(positions, frequencies) for frequencies in self._frequencies]
        return Rotations(rotations[0], rotations[-1])

    def _rotation(self, positions: Tensor, frequencies: Frequencies) -> Rotation:
        exact = positions.double()  # at a million tokens, fp32 angles are off by 0.03 rad
        if self.seq_len_interpolation_factor is not None:
            exact = exact * (1 / self.seq_len_interpolation_factor)
        angles = torch.outer(exact, frequencies.inverse.double())
        cos, sin = angles.cos(), angles.sin()
        if frequencies.stretch != 1:
            cos, sin = cos * frequencies.stretch, sin * frequencies.stretch
        return Rotation(cos.float(), sin.float(), self.rotary_interleaved)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> None:
        """Return None: Megatron's layers rotate nothing."""


def _refuse_other_kinds(original: torch.nn.Module) -> None:
    """Refuse subclasses that may compute other angles than `ShardedRotaryEmbedding` does."""
    if not isinstance(original, ShardedRotaryEmbedding) and any(
        getattr(type(original), name, None) is not getattr(RotaryEmbedding, name)
        for name in ("forward", "get_emb", "get_freqs_non_repeated")
    ):
        raise refuse(
            "rotary_pos_emb",
            type(original).__name__,
            "Megatron's RotaryEmbedding (position_embedding_type=rope)",
            "Multimodal positions are not supported. YaRN is, with ShardedRotaryEmbedding's own frequencies "
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
