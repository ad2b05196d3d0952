"""What reductions and merges over peer memory write into: two halves of memory and flags of every rank; messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.quantize import QuantFormat
from .symmetric import make_room, share

MOST_BLOCKS = 128
_STEPS = 2
_RAW_GROUP = 128
ROOM = 64 * 2**20
"""Bytes of each of the two halves of a rank's memory; what does not fit is reduced piece by piece."""
_REMEDY = "Choose reduction.transport=collective, which needs none."


@dataclass(frozen=True)
class PeerMemory:
    """Memory that all ranks of a group can write, as one rank sees it.

    Attributes:
        data: `[world]` int64 on the device: addresses of every rank's two halves, 16 bytes aligned.
        flags: `[world]` int64: addresses of every rank's flags, `num_flags(world)` int64 that begin as 0.
        state: `[2]` int64, zeros at first: calls that have ended; blocks of this call that have.
        room: bytes of a half, a multiple of 16.
        blocks: most blocks of a call, the same on all ranks.
        owned: what has to live as long as these addresses.
    """

    rank: int
    world: int
    data: Tensor
    flags: Tensor
    state: Tensor
    room: int
    blocks: int = MOST_BLOCKS
    owned: tuple[Any, ...] = ()

    @staticmethod
    def num_flags(world: int) -> int:
        return _STEPS * MOST_BLOCKS * world


@dataclass(frozen=True)
class Wire:
    """How values travel: quantized (form), or as they are (None) in x's dtype."""

    form: QuantFormat | None
    itemsize: int

    @property
    def group_size(self) -> int:
        return self.form.group_size if self.form else _RAW_GROUP

    @property
    def group_bytes(self) -> int:
        """Of a group, in a message of many."""
        return self.message_bytes(16 * self.group_size) // 16

    def groups(self, chunk: int) -> int:
        return -(-chunk // self.group_size)

    def value_bytes(self, chunk: int) -> int:
        return self.form.value_bytes(chunk) if self.form else self.groups(chunk) * _RAW_GROUP * self.itemsize

    def message_bytes(self, chunk: int) -> int:
        return self.form.message_bytes(chunk) if self.form else self.value_bytes(chunk)


@dataclass(frozen=True)
class Piece:
    """What one call reduces: `chunk` elements of every rank's part of x, the parts `stride` elements apart."""

    chunk: int
    stride: int
    scatter: bool = False


def peer_memory(group: dist.ProcessGroup, device: torch.device, room: int = ROOM, remedy: str = _REMEDY) -> PeerMemory:
    """Memory that all ranks of `group` make together; see `find_hosts`.

    Args:
        room: bytes of a half, a multiple of 16; there are two, and some KiB of flags.
        remedy: what helps where it cannot be had.

    Raises:
        PeerMemoryError: symmetric memory cannot be used; raised by all ranks alike.
    """
    world = dist.get_world_size(group)
    sizes = (2 * room, 8 * PeerMemory.num_flags(world))
    make_room(device, sum(sizes))
    with torch.inference_mode(False):
        handles = share(group, group, device, sizes, remedy=remedy)
        views = [
            [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(world)]
            for handle, size in zip(handles, sizes, strict=True)
        ]
        data, flags = (torch.tensor([v.data_ptr() for v in of], dtype=torch.int64, device=device) for of in views)
        state = torch.zeros(2, dtype=torch.int64, device=device)
    processors = torch.tensor(torch.cuda.get_device_properties(device).multi_processor_count, device=device)
    dist.all_reduce(processors, op=dist.ReduceOp.MIN, group=group)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # every flag is 0
    blocks = min(MOST_BLOCKS, int(processors))
    return PeerMemory(dist.get_rank(group), world, data, flags, state, room, blocks, (handles, views))
