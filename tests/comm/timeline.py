"""In the place of a CUDA device: a time line with events on it, and graphs of what moves it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Timeline:
    """Work moves `now` on, in ms. The host knows what came before `done`, and waits by moving that on.

    late: how long a wait for messages takes when it comes to it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.late = 0.0
        self.done = -1.0
        self.captured: Graph | None = None
        self.events: list[Event] = []
        self.graphs: list[Graph] = []
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captured is not None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self._graph)
        monkeypatch.setattr(torch.cuda, "graph", self._capture)

    def work(self, ms: float) -> None:
        self._do(lambda: self._move_on(ms))

    def wait(self) -> None:
        self._do(lambda: self._move_on(self.late))

    def _do(self, what: Callable[[], None]) -> None:
        if self.captured is None:
            what()
        else:
            self.captured.operations.append(what)

    def _move_on(self, ms: float) -> None:
        self.now += ms

    def _event(self, enable_timing: bool = False, external: bool = False) -> Event:
        self.events.append(Event(self, enable_timing, external))
        return self.events[-1]

    def _graph(self) -> Graph:
        self.graphs.append(Graph())
        return self.graphs[-1]

    @contextmanager
    def _capture(self, graph: Graph, **_: Any) -> Iterator[None]:
        self.captured = graph
        try:
            yield
        finally:
            self.captured = None


class Graph:
    def __init__(self) -> None:
        self.operations: list[Callable[[], None]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for operation in self.operations:
            operation()


class Event:
    def __init__(self, timeline: Timeline, timed: bool, external: bool) -> None:
        self._timeline, self._timed, self._external = timeline, timed, external
        self.at: float | None = None

    def record(self, stream: Timeline) -> None:
        assert stream is self._timeline
        assert stream.captured is None or self._external, "it would say nothing about replays"
        stream._do(self._happen)

    def _happen(self) -> None:
        self.at = self._timeline.now

    def synchronize(self) -> None:
        assert self.at is not None and not self._external, "what it waits for in a graph is not documented"
        self._timeline.done = max(self._timeline.done, self.at)

    def elapsed_time(self, stop: Event) -> float:
        assert self.at is not None and stop.at is not None and self._timed and stop._timed, "CUDA refuses this"
        assert max(self.at, stop.at) <= self._timeline.done, "CUDA refuses this"
        return stop.at - self.at
