"""Peer memory: whether ranks can read each other's memory, its allocation by all of them or none, and flags in it.

It is torch's symmetric memory. Reading another rank's memory requires that both are on one host whose GPUs are
connected.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_or_none, gather_objects
from .device import synchronize

_SPARE_BYTES = 2**28
"""Device memory to leave free beside symmetric memory: for its rounding, for NCCL and for kernel code."""

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_EQUAL = 1
_MAX_OPERATIONS = 255
"""The most operations per driver call (cuStreamBatchMemOp: fewer than 256)."""
_NO_FLAGS = ctypes.c_uint(0)


def why_no_peer_memory(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why the ranks of a group cannot read each other's memory; None if they can. Collective: all get the same.

    Processes may see different devices, so each rank checks its own.
    """
    index = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    machines, devices = zip(*gather_objects(group, (os.uname().nodename, index)), strict=True)
    if None in devices:
        return "not all ranks have a CUDA device"
    if len(set(machines)) > 1:
        return "they are on several hosts"
    reasons = gather_objects(group, _unreadable(devices[dist.get_rank(group)], devices))
    return next((reason for reason in reasons if reason is not None), None)


def on_one_machine(group: dist.ProcessGroup, size: int) -> bool:
    """Whether every `size` neighbouring ranks share a machine; the same on all ranks. Collective."""
    machines = gather_objects(group, os.uname().nodename)
    return all(len(set(machines[i : i + size])) == 1 for i in range(0, len(machines), size))


def _unreadable(mine: int, others: Sequence[int]) -> str | None:
    """Return why this rank's GPU cannot read the memory of one of the others; None if nothing prevents it."""
    for other in others:
        if other != mine and other < torch.cuda.device_count() and not torch.cuda.can_device_access_peer(mine, other):
            return f"GPU {mine} cannot read the memory of GPU {other}"
    return None


def allocate(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int], remedy: str, what: str) -> list[Any]:
    """Allocate zeroed symmetric memory of `sizes` bytes, and return a handle for each size. Collective over `group`.

    No rank waits for one that could not allocate: addresses are exchanged only once all ranks have memory.

    Raises PeerMemoryError: it failed on some rank of `group`; raised by all of them alike.
    """

    def empty() -> list[Tensor]:
        return [symmetric_memory().empty(size, dtype=torch.uint8, device=device) for size in sizes]

    tensors = all_or_none(group, empty, what, remedy)

    def rendezvous() -> list[Any]:
        handles = [symmetric_memory().rendezvous(tensor, group) for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        synchronize(device)
        return handles

    return all_or_none(group, rendezvous, what, remedy)


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
        self._operations, self._batches = operations, list[tuple[ctypes.c_uint, Any]]()
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

    def then(self, others: FlagOperations) -> FlagOperations:
        """Return these operations and, behind them, others. A stream runs them in this order."""
        return FlagOperations([*self._operations, *others._operations])

    def issue(self, stream: Any) -> None:
        """Append the operations to a CUDA stream."""
        for count, batch in self._batches:
            code = driver().cuStreamBatchMemOp_v2(ctypes.c_void_p(stream.cuda_stream), count, batch, _NO_FLAGS)
            if code:
                raise RuntimeError(f"cuStreamBatchMemOp returned CUDA error {code} for {count.value} operations")


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
