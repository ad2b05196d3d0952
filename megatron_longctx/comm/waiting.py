"""How long parts of a pass take a rank: measured where they happen, not inferred."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

Pair = tuple[torch.cuda.Event, torch.cuda.Event]


class Times(NamedTuple):
    """Seconds that a rank's attention has waited for messages, and those it has computed."""

    waited_s: float
    computed_s: float


class StreamClock:
    """Adds up the time between `start` and `stop`: on CUDA as the caller's stream sees it, without the host waiting.

    `running`: whether anybody wants to know; whoever does sets it, and has to `take` what was measured now and then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._pairs: list[Pair] = []
        self._spare: list[torch.cuda.Event] = []
        self._seconds = 0.0
        self._since = 0.0
        self.running = False

    def start(self) -> None:
        if self._cuda:
            begin, end = (self._event() for _ in range(2))
            begin.record(torch.cuda.current_stream(self._device))
            self._pairs.append((begin, end))
        else:
            self._since = time.perf_counter()

    def stop(self) -> None:
        if self._cuda:
            self._pairs[-1][1].record(torch.cuda.current_stream(self._device))
        else:
            self._seconds += time.perf_counter() - self._since

    def take(self) -> float:
        """Seconds since the last call; waits for what the device has not finished."""
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


@contextmanager
def measured(clock: StreamClock | None) -> Iterator[None]:
    """What the caller's stream does inside is measured by a clock that is running."""
    if clock is None or not clock.running:
        yield
        return
    clock.start()
    try:
        yield
    finally:
        clock.stop()
