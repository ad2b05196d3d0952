"""How long a rank's computation has waited for messages: measured where it waits, not inferred."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Pair = tuple[torch.cuda.Event, torch.cuda.Event]


class GraphWaits:
    """The waits of a CUDA graph: each of its replays records their events anew.

    Attributes:
        pairs: where each wait begins and ends.
        replays: how many there were since they were last counted.
        ended: recorded behind every replay. What an event within a graph says before its replay has come that far is
            not documented.
    """

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.replays = 0
        self.ended: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]


class WaitClock:
    """Adds up the time between `start` and `stop`: on CUDA as the caller's stream sees it, without the host waiting.

    Of graphs that are replayed only the last replay's times are there when they are asked for: each replay since the
    last time counts with what the last one has waited.

    `running`: whether anybody wants to know; whoever does sets it, and has to `take` what was measured now and then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._pairs: list[Pair] = []
        self._spare: list[torch.cuda.Event] = []
        self._captured: GraphWaits | None = None
        self._replayed: list[GraphWaits] = []  # also those whose graph is gone
        self._seconds = 0.0
        self._since = 0.0
        self.running = False

    @property
    def measures(self) -> bool:
        """Whether to `start` and `stop` here and now: not in a graph whose replays nobody would tell of."""
        if not self.running:
            return False
        return self._captured is not None or not (self._cuda and torch.cuda.is_current_stream_capturing())

    def start(self) -> None:
        if self._cuda:
            begin, end = (self._event() for _ in range(2))
            begin.record(torch.cuda.current_stream(self._device))
            self._recorded().append((begin, end))
        else:
            self._since = time.perf_counter()

    def stop(self) -> None:
        if self._cuda:
            self._recorded()[-1][1].record(torch.cuda.current_stream(self._device))
        else:
            self._seconds += time.perf_counter() - self._since

    @contextmanager
    def in_graph(self) -> Iterator[GraphWaits | None]:
        """A graph is captured inside; gives its waits, for `replayed`, or None if the clock does not run."""
        self._captured = GraphWaits() if self.running else None
        try:
            yield self._captured
        finally:
            self._captured = None

    def replayed(self, waits: GraphWaits) -> None:
        """The graph of these has just been replayed on the caller's stream."""
        waits.ended.record(torch.cuda.current_stream(self._device))
        if not waits.replays:
            self._replayed.append(waits)
        waits.replays += 1

    def take(self) -> float:
        """Seconds since the last call; waits for what the device has not finished."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
        ms = _ms(self._pairs)
        for waits in self._replayed:
            waits.ended.synchronize()
            ms += waits.replays * _ms(waits.pairs)
            waits.replays = 0
        self._spare += [event for pair in self._pairs for event in pair]
        self._pairs, self._replayed = [], []
        seconds, self._seconds = self._seconds + ms / 1e3, 0.0
        return seconds

    def _recorded(self) -> list[Pair]:
        return self._pairs if self._captured is None else self._captured.pairs

    def _event(self) -> torch.cuda.Event:
        if self._captured is None and self._spare:
            return self._spare.pop()
        event: torch.cuda.Event = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=True, external=self._captured is not None
        )
        return event


@contextmanager
def measured_wait(clock: WaitClock | None) -> Iterator[None]:
    """What the caller's stream does inside is waiting for messages, and measured as such by a clock that measures."""
    if clock is None or not clock.measures:
        yield
        return
    clock.start()
    try:
        yield
    finally:
        clock.stop()


def _ms(pairs: list[Pair]) -> float:
    return float(sum(begin.elapsed_time(end) for begin, end in pairs))
