"""The merge of the partial results of several ranks of one host, in one kernel over peer memory."""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from ..lowbit.peer_memory import PeerMemory, allocate_peer_memory
from .paged import PackedPartials


class PeerMerge:
    """Merges the partial results of the ranks of one host over disjoint keys, in one kernel.

    Every rank gets all heads, with the same bits, or its own part of them.

    It replaces an all-gather between two merges. All ranks make the same calls with the same shapes, in one order on
    the device. Calls can be captured in a CUDA graph after the same call has been made once, which compiles the kernel.
    """

    def __init__(self, memory: PeerMemory, parts: int = 1) -> None:
        from . import peer_merge_triton

        self._memory, self._kernels, self._parts = memory, peer_merge_triton, parts

    @staticmethod
    def of(
        group: dist.ProcessGroup, device: torch.device, rows: int, heads: int, head_dim: int, parts: int = 1
    ) -> PeerMerge:
        """Allocate memory for the results of up to `rows` queries. Collective; see `allocate_peer_memory`.

        Args:
            heads: that every rank gets.
            parts: the number of ranks if they get different heads, 1 if all of them get all heads.

        Raises:
            PeerMemoryError: symmetric memory cannot be used; raised by all ranks alike.
        """
        half_bytes = dist.get_world_size(group) * _message_bytes(rows, heads, head_dim)
        return PeerMerge(
            allocate_peer_memory(group, device, half_bytes, "Leave more of the device's memory free."), parts
        )

    def compile(self, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile the kernel for decode: for few and many splits, and for counts that are multiples of 16 or not."""
        for rows, splits in product((1, 16), (1 << i for i in range(8))):
            out = torch.empty(rows, heads, head_dim, dtype=dtype, device=device)
            partials = PackedPartials.empty(out.repeat(1, self._parts, 1), (splits,))
            partials.flat.zero_()
            self(partials, out)

    def fits(self, rows: int, heads: int, head_dim: int) -> bool:
        """Whether the memory has room for the results of `rows` queries."""
        return self._memory.world * _message_bytes(rows, heads, head_dim) <= self._memory.half_bytes

    def __call__(self, partials: PackedPartials, out: Tensor) -> Tensor:
        """Merge this rank's partial results, then the merged results of all ranks in the order of ranks.

        Args:
            partials: this rank's `[splits, B, parts * h, d]` and `[splits, B, parts * h]` fp32; `splits` may differ
                between ranks.
            out: `[B, h, d]` contiguous, any float dtype: is written and returned. 0 where no rank has keys.
        """
        rows, heads, head_dim = out.shape
        with torch.no_grad(), torch.cuda.device(out.get_device()):  # a CPU tensor's index, -1, changes nothing
            self._kernels.merge_over_peers(self._memory, partials, out, _message_bytes(rows, heads, head_dim))
        return out


def _message_bytes(rows: int, heads: int, head_dim: int) -> int:
    return -(-rows * heads * (head_dim + 1) * 4 // 16) * 16
