"""Whether passes of a kind are replayed from a graph or run as they are: both are tried, and one stays.

A replay spares the host its launches but copies inputs and results. A pass as it is comes without copies, but must be
launched in less time than it runs for: else the device waits for the host sooner or later, even where a few such
passes, behind others that are still running, seem fast. What a launch takes depends on the mode and the host.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST = 4
"""Passes as they are. The first chooses and compiles kernels; the others tell what the host takes to launch one, as
long as it does not have to wait for room among launches that the device has yet to get to."""
_PHASES = (
    (_FIRST, False, False),
    (_FIRST + 64, True, False),  # captured; a job's first steps say little
    (_FIRST + 72, True, True),
    (_FIRST + 74, False, False),
    (_FIRST + 82, False, True),
)
"""Passes up to a number: whether they are replayed, and timed on the device."""
_MARGIN = 1.1
"""Launching has to be faster than running by so much."""

SETTLED = _PHASES[-1][0]
"""Passes after which one way is taken, once the device has done the timed ones."""


class Trial:
    """One kind of pass. Every rank tries the same way in the same pass, and then takes what is better for itself:
    messages are the same either way.

    Args:
        mark: a new timed mark on the caller's stream, with `query` and `elapsed_time` (ms) as an event's. The host
            never waits for one.
        clock: the host's, in seconds.
    """

    def __init__(self, mark: Callable[[], Any] | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.replays: bool | None = None
        self._mark, self._clock = mark or _mark, clock
        self._passes = 0
        self._launched_ms: list[float] = []
        self._timed: dict[bool, list[tuple[Any, Any]]] = {True: [], False: []}

    def run(self, replayed: Callable[[], T], eager: Callable[[], T]) -> T:
        """One pass, by either way."""
        self._judge()
        number, way, timed = self._next()
        begun = self._clock()
        start = self._mark() if timed else None
        found = replayed() if way else eager()
        if timed:
            self._timed[way].append((start, self._mark()))
        if 0 < number < _FIRST:
            self._launched_ms.append((self._clock() - begun) * 1e3)
        return found

    def _next(self) -> tuple[int, bool, bool]:
        """The next pass's number, and whether it is replayed and timed."""
        number, self._passes = self._passes, self._passes + 1
        if self.replays is not None:
            return number, self.replays, False
        way, timed = next(((way, timed) for stop, way, timed in _PHASES if number < stop), (False, False))
        return number, way, timed

    def _judge(self) -> None:
        if self.replays is not None or self._passes < SETTLED:
            return
        if not all(stop.query() for pairs in self._timed.values() for _, stop in pairs):
            return
        took = {way: statistics.median(a.elapsed_time(b) for a, b in pairs) for way, pairs in self._timed.items()}
        launched = min(self._launched_ms)
        self.replays = took[True] <= took[False] or launched * _MARGIN >= took[False]
        self._timed.clear()
        logger.debug(
            "attention takes %.3f ms replayed from a graph, %.3f ms as it is, launched in %.3f ms: %s from now on",
            took[True], took[False], launched, "replayed" if self.replays else "as it is",
        )  # fmt: skip


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
