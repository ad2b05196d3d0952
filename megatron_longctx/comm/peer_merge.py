"""Merging what ranks have found over disjoint keys, over peer memory: what a gather between two merges does, in one
kernel. Every rank ends with the same bits."""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.paged import PackedPartials
from .peer_memory import PeerMemory, peer_memory

_REMEDY = "Leave more of the device's memory free."


class PeerMerge:
    """Merges among GPUs of one host. All ranks make the same calls with the same shapes, in one order on the device.

    Calls can be captured in a CUDA graph once the same call has been made before (Triton compiles at the first).
    """

    def __init__(self, memory: PeerMemory) -> None:
        from . import peer_merge_kernel

        self._memory, self._kernel = memory, peer_merge_kernel

    @staticmethod
    def of(group: dist.ProcessGroup, device: torch.device, rows: int, heads: int, head_dim: int) -> PeerMerge:
        """Over memory for results of so many queries, which all ranks of `group` make together; see `find_hosts`.

        Raises:
            PeerMemoryError: symmetric memory cannot be used; raised by all ranks alike.
        """
        room = dist.get_world_size(group) * _message_bytes(rows, heads, head_dim)
        return PeerMerge(peer_memory(group, device, room, _REMEDY))

    def compile(self, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Merge what decode does once: of few shares and of many, multiples of 16 numbers apart or not."""
        for rows, splits in product((1, 16), (1 << i for i in range(8))):
            out = torch.empty(rows, heads, head_dim, dtype=dtype, device=device)
            shares = PackedPartials.empty(out, (splits,))
            shares.flat.zero_()
            self(shares, out)

    def fits(self, rows: int, heads: int, head_dim: int) -> bool:
        """Whether results of so many queries can be merged so."""
        return self._memory.world * _message_bytes(rows, heads, head_dim) <= self._memory.room

    def __call__(self, shares: PackedPartials, out: Tensor) -> Tensor:
        """Merge every rank's results, in the order of ranks, once each rank has merged its own.

        Args:
            shares: `[splits, B, h, d]` and `[splits, B, h]` fp32, of this rank's keys; ranks may have other numbers of
                splits.
            out: `[B, h, d]` contiguous, any float dtype: is written and returned. 0 where no rank has keys.
        """
        rows, heads, head_dim = out.shape
        with torch.no_grad(), torch.cuda.device(out.get_device()):  # a CPU tensor's index, -1, changes nothing
            self._kernel.merge_over_peers(self._memory, shares, out, _message_bytes(rows, heads, head_dim))
        return out


def _message_bytes(rows: int, heads: int, head_dim: int) -> int:
    return -(-rows * heads * (head_dim + 1) * 4 // 16) * 16
