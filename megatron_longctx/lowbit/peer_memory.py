"""Memory that kernels of all ranks of a host write."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm.symmetric import allocate, free_cached_memory

MAX_BLOCKS = 128
_STEPS = 2


@dataclass(frozen=True)
class PeerMemory:
    """Double-buffered memory and flags that all ranks of a group can write, as one rank sees them.

    Attributes:
        data: `[world]` int64 on the device: the addresses of the ranks' memories, 16 bytes aligned. Each has two
            halves.
        flags: `[world]` int64: the addresses of the ranks' flags, `num_flags(world)` int64 each, initially 0.
        state: `[2]` int64, initially 0: the calls that have ended, and the blocks of the current call that have ended.
        half_bytes: the size of a half, a multiple of 16.
        blocks: the most thread blocks of a call, the same on all ranks.
        owners: objects that own the memory at these addresses.
    """

    rank: int
    world: int
    data: Tensor
    flags: Tensor
    state: Tensor
    half_bytes: int
    blocks: int = MAX_BLOCKS
    owners: tuple[Any, ...] = ()

    @staticmethod
    def num_flags(world: int) -> int:
        return _STEPS * MAX_BLOCKS * world


def allocate_peer_memory(group: dist.ProcessGroup, device: torch.device, half_bytes: int, remedy: str) -> PeerMemory:
    """Allocate memory that all ranks of `group` can write. Collective. `why_no_peer_memory` says whether
    they can.

    Args:
        half_bytes: a multiple of 16. Each rank allocates two halves, and some KiB of flags.
        remedy: one sentence for the error.

    Raises:
        PeerMemoryError: symmetric memory cannot be used; raised by all ranks alike.
    """
    world = dist.get_world_size(group)
    sizes = (2 * half_bytes, 8 * PeerMemory.num_flags(world))
    free_cached_memory(device, sum(sizes))
    with torch.inference_mode(False):
        handles = allocate(group, device, sizes, remedy, "setting up peer memory")
        views = [
            [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(world)]
            for handle, size in zip(handles, sizes, strict=True)
        ]
        data, flags = (torch.tensor([v.data_ptr() for v in of], dtype=torch.int64, device=device) for of in views)
        state = torch.zeros(2, dtype=torch.int64, device=device)
    processors = torch.tensor(torch.cuda.get_device_properties(device).multi_processor_count, device=device)
    dist.all_reduce(processors, op=dist.ReduceOp.MIN, group=group)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # from here on, every rank's flags are 0
    blocks = min(MAX_BLOCKS, int(processors))
    return PeerMemory(dist.get_rank(group), world, data, flags, state, half_bytes, blocks, (handles, views))
