"""RoPE for any layout: Megatron's own table, taken at the positions that this rank holds."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from .sequence import ShardedSequence


class ShardedRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
    """Replaces `GPTModel.rotary_pos_emb`, which knows the zigzag layout of even lengths only.

    GPTModel ignores position ids when it makes its table, so the layout has to be known here.
    """

    def __init__(self, original: RotaryEmbedding, sequence: ShardedSequence) -> None:
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = original.rotary_interleaved
        self.seq_len_interpolation_factor = original.seq_len_interpolation_factor
        self.inv_freq = original.inv_freq
        self.cp_group = original.cp_group
        self._sequence = sequence
        self._table: tuple[int, Tensor] | None = None

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles `[s, d/2]` in fp32, at this rank's positions instead of `0..max_seq_len-1`."""
        positions = self._sequence.positions(self.inv_freq.device).to(self.inv_freq.dtype) + offset
        if self.seq_len_interpolation_factor is not None:
            positions *= 1 / self.seq_len_interpolation_factor
        angles: Tensor = torch.outer(positions, self.inv_freq)
        return angles

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """The table `[s, 1, 1, d]` of this rank; computed once per sequence length."""
        if offset:
            table: Tensor = self.get_emb(max_seq_len, offset)
            return table
        length = self._sequence.length
        if self._table is None or self._table[0] != length:
            self._table = (length, self.get_emb(max_seq_len))
        return self._table[1]
