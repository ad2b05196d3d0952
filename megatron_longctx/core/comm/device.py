"""A rank's own device: scratch memory that is reused, and clocks that time parts of a pass without a host wait."""

import math
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor


def synchronize(device: torch.device) -> None:
    """Make the host wait for all work of a CUDA device; CPUs have none pending."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mean_seconds(work: Callable[[], object], device: torch.device, count: int) -> float:
    """Return the mean wall-clock seconds of `count` calls of `work` in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / count


class BufferPool:
    """Named scratch tensors, shared by all layers, that keep their memory between uses and grow on demand.

    A caller owns a name until the next `get` of it. Callers order their uses on the device themselves.

    generation: incremented whenever a tensor is reallocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._viewers: list[ref[Any]] = []
        self._storage: dict[Hashable, Tensor] = {}
        self.generation = 0

    def get(self, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous, uninitialized tensor of `shape`."""
        size = math.prod(shape)
        stored = self._storage.get((name, dtype))
        with torch.inference_mode(False):  # the memory outlives the call that allocates it
            if stored is None or stored.numel() < size:
                self.generation += 1
                for viewer in [each() for each in self._viewers]:
                    if viewer is not None:
                        viewer.forget()
                del stored
                self._storage.pop((name, dtype), None)
                stored = self._storage[name, dtype] = torch.empty(size, dtype=dtype, device=self._device)
            return stored[:size].view(shape)

    def add_viewer(self, viewer: Any) -> None:
        """Register an object that keeps views of tensors. Before a reallocation, its `forget` has to give them up: the
        former memory would stay allocated beside the new one."""
        self._viewers.append(ref(viewer, self._viewers.remove))

    @property
    def num_bytes(self) -> int:
        """The allocated bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._storage.values())


class AttentionTimes(NamedTuple):
    """Seconds that a rank's attention waited for messages, and seconds that it computed."""

    waited_s: float
    computed_s: float


class StreamClock:
    """Adds up the time of `with` blocks; on CUDA as the caller's stream runs, without making the host wait.

    running: whether `timed` uses this clock. Whoever sets it has to call `take` from time to time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []
        self._seconds = 0.0
        self._since = 0.0
        self.running = False

    def __enter__(self) -> None:
        if self._cuda:
            begin, end = (self._event() for _ in range(2))
            begin.record(torch.cuda.current_stream(self._device))
            self._pairs.append((begin, end))
        else:
            self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._pairs[-1][1].record(torch.cuda.current_stream(self._device))
        else:
            self._seconds += time.perf_counter() - self._since

    def take(self) -> float:
        """Return the seconds since the last call, after waiting for the device to finish them."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
        ms = float(sum(begin.elapsed_time(end) for begin, end in self._pairs))
        self._spare += [event for pair in self._pairs for event in pair]
        self._pairs = []
        seconds, self._seconds = self._seconds + ms / 1e3, 0.0
        return seconds

    def _event(self) -> torch.cuda.Event:
        if self._spare:
            return self._spare.pop()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return event


def timed(clock: StreamClock | None) -> AbstractContextManager[object]:
    """Time the enclosed work of the caller's stream if `clock` is running."""
    return nullcontext() if clock is None or not clock.running else clock
