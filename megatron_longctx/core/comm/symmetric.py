"""Peer memory: which ranks can read each other's memory, its allocation by all of them or none, and flags in it.

It is torch's symmetric memory. Reading another rank's memory requires that both are on one host whose GPUs are
connected.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import refuse
from .collectives import all_or_none, gather_objects
from .device import synchronize

RANKS_PER_HOST = "MEGATRON_LONGCTX_RANKS_PER_HOST"
"""Environment variable: the number of neighbouring ranks of a process group, on one machine, that count as a host. For
machines whose GPUs are in separate islands, and to test on one machine the behaviour of several hosts."""

_SPARE_BYTES = 2**28
"""Device memory to leave free beside symmetric memory: for its rounding, for NCCL and for kernel code."""

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_EQUAL = 1
_MAX_OPERATIONS = 255
"""The most operations per driver call (cuStreamBatchMemOp: fewer than 256)."""
_NO_FLAGS = ctypes.c_uint(0)


@dataclass(frozen=True)
class Hosts:
    """Disjoint sets of ranks that can read each other's memory.

    Attributes:
        sets: in order; each rank is in exactly one.
        reason: why not all ranks are in one set; None if they are.
    """

    sets: tuple[tuple[int, ...], ...]
    reason: str | None

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Return the set that contains `rank`."""
        return next(ranks for ranks in self.sets if rank in ranks)

    @property
    def has_peers(self) -> bool:
        return any(len(ranks) > 1 for ranks in self.sets)

    def __str__(self) -> str:
        return " | ".join(" ".join(map(str, ranks)) for ranks in self.sets)


def find_hosts(group: dist.ProcessGroup, device: torch.device) -> Hosts:
    """Find out which ranks can read each other's memory; the same on all ranks. Collective.

    Raises:
        ValueError: `RANKS_PER_HOST` is not a number, or differs between ranks.
    """
    index = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    ranks = gather_objects(group, (os.uname().nodename, index, os.environ.get(RANKS_PER_HOST)))
    machines, devices, per_host = zip(*ranks, strict=True)
    if None in devices:
        return Hosts(tuple((rank,) for rank in range(len(devices))), "not all ranks have a CUDA device")
    sets = group_by_host(machines, ranks_per_host(set(per_host)))
    mine = dist.get_rank(group)
    peers = next(ranks for ranks in sets if mine in ranks)
    # Processes may see different devices, so each checks its own.
    reason = _unreadable(devices[mine], [devices[rank] for rank in peers])
    return isolate_unreadable(sets, gather_objects(group, reason))


def on_one_machine(group: dist.ProcessGroup, size: int) -> bool:
    """Whether every `size` neighbouring ranks share a machine; the same on all ranks. Collective."""
    machines = gather_objects(group, os.uname().nodename)
    return all(len(set(machines[i : i + size])) == 1 for i in range(0, len(machines), size))


def group_by_host(machines: Sequence[str], per_host: int | None) -> tuple[tuple[int, ...], ...]:
    """Group ranks by the name of their machine, and divide each group into hosts of `per_host` ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
    size = per_host or len(machines)
    return tuple(tuple(same[i : i + size]) for same in ranks.values() for i in range(0, len(same), size))


def isolate_unreadable(sets: Sequence[Sequence[int]], unreadable: Sequence[str | None]) -> Hosts:
    """Split each host into single ranks if one of them cannot read another's memory, for which it has a reason."""
    result: list[tuple[int, ...]] = []
    reason = "they are on several hosts" if len(sets) > 1 else None
    for ranks in sets:
        against = next((unreadable[rank] for rank in ranks if unreadable[rank] is not None), None)
        reason = against or reason
        result += [tuple(ranks)] if against is None else [(rank,) for rank in ranks]
    return Hosts(tuple(result), reason)


def ranks_per_host(values: set[str | None]) -> int | None:
    """Return the number in all ranks' `RANKS_PER_HOST`; None if no rank sets it.

    Raises:
        ValueError: the values are not one and the same positive integer.
    """
    if values == {None}:
        return None
    value = min(map(str, values))
    if len(values) > 1 or not value.isdecimal() or int(value) < 1:
        shown = ", ".join(sorted(map(str, values)))
        raise refuse(RANKS_PER_HOST, shown, "one whole number, on all ranks", "Correct it.")
    return int(value)


def _unreadable(mine: int, others: Sequence[int]) -> str | None:
    """Return why this rank's GPU cannot read the memory of one of the others; None if nothing prevents it."""
    for other in others:
        if other != mine and other < torch.cuda.device_count() and not torch.cuda.can_device_access_peer(mine, other):
            return f"GPU {mine} cannot read the memory of GPU {other}"
    return None


def memory_remedy(key: str) -> str:
    """Return the remedy for peer memory that cannot be allocated for attention; `key` is the setting that chose it."""
    return (
        f"Choose {key}=p2p, which needs none, or let ranks send less: shorter sequences, more context-parallel ranks, "
        "another schedule."
    )


def allocate(
    group: dist.ProcessGroup,
    subgroup: dist.ProcessGroup | None,
    device: torch.device,
    sizes: Sequence[int],
    remedy: str,
    what: str = "setting up peer memory",
) -> list[Any]:
    """Allocate zeroed symmetric memory of `sizes` bytes. Collective over `group`.

    No rank waits for one that could not allocate: addresses are exchanged only once all ranks have memory.

    Args:
        subgroup: the ranks of `group` that share this rank's memory; None for none.

    Returns:
        a handle for each size, or None for each without a `subgroup`.

    Raises:
        PeerMemoryError: it failed on some rank of `group`; raised by all of them alike.
    """

    def empty() -> list[Tensor]:
        if subgroup is None:
            return []  # takes part in the votes of the others
        return [symmetric_memory().empty(size, dtype=torch.uint8, device=device) for size in sizes]

    tensors = all_or_none(group, empty, what, remedy)

    def rendezvous() -> list[Any]:
        handles = [symmetric_memory().rendezvous(tensor, subgroup) for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        synchronize(device)
        return handles

    return all_or_none(group, rendezvous, what, remedy) or [None] * len(sizes)


def free_cached_memory(device: torch.device, num_bytes: int) -> None:
    """Empty torch's allocator cache if fewer than `num_bytes` are free.

    Otherwise keep it, because later kernels would wait for the memory to be allocated again.
    """
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < num_bytes + _SPARE_BYTES:
        torch.cuda.empty_cache()


def symmetric_memory() -> Any:
    """Return torch's symmetric memory module."""
    # Reads need no multicast, and its set-up fails on systems without NVLink SHARP.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, whose largest member is six 64-bit words."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class FlagOperations:
    """Operations on 32-bit flags in device memory, prepared once and issued to a stream with one driver call.

    These are the driver's stream memory operations, because a kernel that spins for a peer needs an SM, and long
    attention kernels occupy all of them. Flags are 0 or 1, and the waiter resets them to 0, so the same operations
    serve every pass.
    """

    def __init__(self, operations: Sequence[tuple[int, int, int]]) -> None:
        self._batches = []
        for first in range(0, len(operations), _MAX_OPERATIONS):
            some = operations[first : first + _MAX_OPERATIONS]
            batch = (_Operation * len(some))()
            for entry, (operation, address, value) in zip(batch, some, strict=True):
                entry.operation, entry.address, entry.value = operation, address, value
                entry.flags = _EQUAL if operation == _WAIT_VALUE_32 else 0
            self._batches.append((ctypes.c_uint(len(some)), batch))

    @classmethod
    def set(cls, addresses: Sequence[int]) -> FlagOperations:
        """Set the flags; whoever sees one also sees everything that the stream has written before."""
        return cls([(_WRITE_VALUE_32, address, 1) for address in addresses])

    @classmethod
    def wait_and_clear(cls, addresses: Sequence[int]) -> FlagOperations:
        """Wait until all flags are set, then clear them."""
        waits = [(_WAIT_VALUE_32, address, 1) for address in addresses]
        return cls(waits + [(_WRITE_VALUE_32, address, 0) for address in addresses])

    def issue(self, stream: Any) -> None:
        """Append the operations to a CUDA stream.

        Raises:
            RuntimeError: the driver returned an error.
        """
        for count, batch in self._batches:
            code = _driver().cuStreamBatchMemOp_v2(ctypes.c_void_p(stream.cuda_stream), count, batch, _NO_FLAGS)
            if code:
                raise RuntimeError(f"cuStreamBatchMemOp returned CUDA error {code} for {count.value} operations")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
