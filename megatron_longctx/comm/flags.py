"""Flags in device memory that streams set and wait for without a kernel: the driver's stream memory operations.

A kernel that spins until a peer is ready needs a processor, and there is none while long attention kernels fill the
device; a stream's own wait needs none. Flags are 0 or 1 and go back to 0 by the one who waited, so that the same
operations serve every pass.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_EQUAL = 1
_MOST = 255
"""Operations that the driver takes in one call (cuStreamBatchMemOp: less than 256)."""
_NO_FLAGS = ctypes.c_uint(0)


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams: its largest member is six 64-bit words."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class FlagOperations:
    """Operations on flags, prepared once and issued to a stream with one call of the driver (or a few, if many)."""

    def __init__(self, operations: Sequence[tuple[int, int, int]]) -> None:
        self._batches = []
        for first in range(0, len(operations), _MOST):
            some = operations[first : first + _MOST]
            batch = (_Operation * len(some))()
            for place, (operation, address, value) in zip(batch, some, strict=True):
                place.operation, place.address, place.value = operation, address, value
                place.flags = _EQUAL if operation == _WAIT_VALUE_32 else 0
            self._batches.append((ctypes.c_uint(len(some)), batch))

    @classmethod
    def set(cls, addresses: Sequence[int]) -> FlagOperations:
        """Set every flag; what the stream has written before is visible to whoever sees it."""
        return cls([(_WRITE_VALUE_32, address, 1) for address in addresses])

    @classmethod
    def take(cls, addresses: Sequence[int]) -> FlagOperations:
        """Wait until every flag is set, and clear them."""
        waits = [(_WAIT_VALUE_32, address, 1) for address in addresses]
        return cls(waits + [(_WRITE_VALUE_32, address, 0) for address in addresses])

    def issue(self, stream: Any) -> None:
        """Append to a CUDA stream.

        Raises:
            RuntimeError: the driver refused.
        """
        for count, batch in self._batches:
            code = _driver().cuStreamBatchMemOp_v2(ctypes.c_void_p(stream.cuda_stream), count, batch, _NO_FLAGS)
            if code:
                raise RuntimeError(f"cuStreamBatchMemOp returned CUDA error {code} for {count.value} operations")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
