"""Memory that the ranks of a group can read from each other (torch's symmetric memory), set up so that nobody hangs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collect import all_or_none

_SPARE = 2**28
"""Bytes of a device that are left free beside symmetric memory: for its rounding, for NCCL, for kernels' code."""


def remedy_by(key: str) -> str:
    """What helps where attention's memory is refused. key: the setting that chose peer memory."""
    return (
        f"Choose {key}=p2p, which needs none, or let ranks send less: shorter sequences, more context-parallel ranks, "
        "another parallelism.schedule."
    )


def share(
    group: dist.ProcessGroup,
    sharing: dist.ProcessGroup | None,
    device: torch.device,
    sizes: Sequence[int],
    what: str = "setting up peer memory",
    remedy: str = remedy_by("attention.transport"),
) -> list[Any]:
    """Zeroed memory of `sizes` bytes, shared among the ranks of `sharing`: a handle each, or None without `sharing`.

    No rank waits for one that could not allocate: the ranks meet only once all have memory.

    Args:
        group: the ranks that call this together.
        sharing: those of them that share this rank's memory.

    Raises:
        PeerMemoryError: it failed on some rank of `group`; raised by all of them alike.
    """
    if sharing is None:
        for _ in range(2):
            all_or_none(group, lambda: None, what, remedy)
        return [None] * len(sizes)

    def allocate() -> list[Tensor]:
        symmetric = symmetric_memory()
        return [symmetric.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    tensors = all_or_none(group, allocate, what, remedy)

    def rendezvous() -> list[Any]:
        handles = [symmetric_memory().rendezvous(tensor, sharing) for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        finish(device)
        return handles

    return all_or_none(group, rendezvous, what, remedy)


def make_room(device: torch.device, num_bytes: int) -> None:
    """See that so many bytes can be taken: what torch keeps for later is given back, but only if it has to be, since
    the kernels that follow would wait for it to be taken again."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < num_bytes + _SPARE:
        torch.cuda.empty_cache()


def finish(device: torch.device) -> None:
    """Wait for all that the device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def symmetric_memory() -> Any:
    """torch's module of this name."""
    # Pulls need no multicast, and systems without NVLink SHARP fail when it is set up.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory

    return _symmetric_memory
