"""What reductions and merges over peer memory write into: two halves of memory and flags of every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .symmetric import make_room, share

MOST_BLOCKS = 128
_STEPS = 2


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


def peer_memory(group: dist.ProcessGroup, device: torch.device, room: int, remedy: str) -> PeerMemory:
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
