"""Peer memory of CPU processes that map the same files, or of one process, for Triton's interpreter."""

from pathlib import Path

import torch

from megatron_longctx.lowbit.peer_memory import PeerMemory


def one_process(world: int, half_bytes: int) -> list[PeerMemory]:
    """Return the views of all ranks, whose phases have to run one after the other."""
    data = torch.zeros(world, 2 * half_bytes + 16, dtype=torch.uint8)
    flags = torch.zeros(world, PeerMemory.num_flags(world), dtype=torch.int64)
    return [_view(rank, list(data), list(flags), half_bytes) for rank in range(world)]


def mapped(folder: Path, rank: int, world: int, half_bytes: int) -> PeerMemory:
    """Return this rank's view of files that all ranks map."""
    num_flags = PeerMemory.num_flags(world)
    data = [torch.from_file(str(folder / f"data{r}"), True, 2 * half_bytes, dtype=torch.uint8) for r in range(world)]
    flags = [torch.from_file(str(folder / f"flags{r}"), True, num_flags, dtype=torch.int64) for r in range(world)]
    return _view(rank, data, flags, half_bytes)


def _view(rank: int, data: list[torch.Tensor], flags: list[torch.Tensor], half_bytes: int) -> PeerMemory:
    addresses = [torch.tensor([t.data_ptr() for t in of]) for of in (data, flags)]
    return PeerMemory(rank, len(data), *addresses, torch.zeros(2, dtype=torch.int64), half_bytes, 3, (data, flags))
