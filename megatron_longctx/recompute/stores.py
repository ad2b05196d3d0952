"""Where the inputs of layers and the results of their attention wait between forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

AGAIN = (
    "has been given back already: expected one backward per forward. "
    "Run forward again instead of keeping the graph for a second backward."
)


class Kept:
    """Tensors that wait where they are."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._here: tuple[Tensor, ...] | None = tensors

    def take(self) -> tuple[Tensor, ...]:
        """The tensors, ready for the current stream.

        Raises:
            RuntimeError: they have been taken before.
        """
        tensors, self._here = self._here, None
        if tensors is None:
            raise RuntimeError(f"what a layer kept {AGAIN}")
        return tensors


class Store(Protocol):
    """Shared by the layers of a model, which run in the order of forward and give it what they keep."""

    def begin(self) -> None:
        """A run of the next layer begins: what is kept from now on belongs to it."""

    def keep(self, *tensors: Tensor) -> Kept:
        """Take care of tensors until backward asks for them."""


class DeviceStore:
    """Leaves tensors where they are."""

    def begin(self) -> None:
        pass

    def keep(self, *tensors: Tensor) -> Kept:
        return Kept(tensors)


class HostStore:
    """Keeps tensors in host memory, pinned where there is a GPU.

    Copies run on a stream of their own, beside the computation. On the device are the tensors of two runs of layers,
    however many layers and micro-batches in flight there are: in forward those of the run under way and of the one
    before it, in backward those of the run that is repeated and of the one that forward had before it, which backward
    asks for next and which are fetched meanwhile. Backward of a micro-batch begins with the two that are still there,
    unless forward of another has come between (pipelines): then its last layer waits for its way back.
    """

    def __init__(self) -> None:
        self._run = 0
        self._kept: weakref.WeakValueDictionary[int, _OnHost] = weakref.WeakValueDictionary()
        self._count = 0
        self._memory = _HostMemory()
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        self._run += 1
        self._leave_but(self._run)

    def keep(self, *tensors: Tensor) -> Kept:
        device = tensors[0].device
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        kept = _OnHost(tensors, self, self._run, self._memory, self._stream)
        self._count += 1
        self._kept[self._count] = kept
        return kept

    def bring(self, run: int) -> None:
        """What `run` kept, and the run before it, comes to the device; all else leaves."""
        self._leave_but(run)
        for wanted in (run, run - 1):
            for kept in list(self._kept.values()):
                if kept.run == wanted:
                    kept.fetch()

    def _leave_but(self, run: int) -> None:
        for kept in list(self._kept.values()):
            if kept.run not in (run, run - 1):
                kept.leave_device()


class _HostMemory:
    """Buffers that are allocated once and used again in every step.

    Torch caches pinned memory too, but gives a block away again only once the host has seen that the device has read
    it: where the host is ahead of the device (many micro-batches a step) it would pin more. Here all copies go through
    one stream, whose order is enough: a buffer is free as soon as its last copy has been issued.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def take(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """A buffer, and a view of it with the shape, type and strides of a copy of `like`. Sizes are powers of two, as
        torch's pinned memory has them, so that packs of unequal lengths share buffers."""
        size = like.numel() * like.element_size()
        rounded = 1 << max(0, size - 1).bit_length()
        free = self._free.setdefault(rounded, [])
        if not free:
            free.append(torch.empty(rounded, dtype=torch.uint8, pin_memory=like.device.type == "cuda"))
        buffer = free.pop()
        strides = torch.empty_like(like, device="meta").stride()  # which kernels care for
        return buffer, buffer[:size].view(like.dtype).as_strided(like.shape, strides)

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


class _OnHost(Kept):
    """Tensors of one run of a layer on their way to the host, there, or on their way back."""

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        store: HostStore,
        run: int,
        memory: _HostMemory,
        stream: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(tensors)
        self.run = run
        self._store, self._memory, self._stream = store, memory, stream
        self._device = tensors[0].device
        self._copied: torch.cuda.Event | None = None
        taken = [memory.take(x) for x in tensors]
        self._buffers, self._host = [buffer for buffer, _ in taken], [view for _, view in taken]
        self._copy(tensors, self._host)

    def take(self) -> tuple[Tensor, ...]:
        self._store.bring(self.run)
        self._end()
        return super().take()

    def fetch(self) -> None:
        if self._here is None and self._host:
            self._here = tuple(torch.empty_like(x, device=self._device) for x in self._host)
            self._copy(self._host, self._here)

    def leave_device(self) -> None:
        """The computation waits for the copy, which is long over, and not the memory for the host to see that it is:
        so the device's memory is free for what comes next however far the host is ahead."""
        if self._host:
            self._wait()
            self._here = None

    def __del__(self) -> None:  # without a backward: a copy may be under way
        self._end()

    def _end(self) -> None:
        self._wait()
        for buffer in self._buffers:
            self._memory.give_back(buffer)
        self._buffers, self._host = [], []

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def _copy(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        if self._stream is None:
            for x, copy in zip(sources, copies, strict=True):
                copy.copy_(x)
            return
        # Also for the way back: the copies' memory may still be read by what the current stream was given before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for x, copy in zip(sources, copies, strict=True):
                copy.copy_(x, non_blocking=True)
        self._copied = self._stream.record_event()
