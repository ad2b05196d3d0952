"""Whether passes of a kind are replayed from a graph or run as they are: both are tried, and the faster one stays.

A replay spares the host its launches but copies inputs and results. Which of the two takes longer depends on the mode,
the host, and how far the rest of the model lets the host run ahead: so it is measured where it is used.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PHASES = (
    (2, False, False),  # kernels are chosen and compiled, memory is set up
    (66, True, False),  # captured; a job's first steps say little
    (74, True, True),
    (76, False, False),
    (84, False, True),
)
"""Passes up to a number: whether they are replayed, and timed."""

SETTLED = _PHASES[-1][0]
"""Passes after which the faster way is taken, once the device has done the timed ones."""


class Trial:
    """One kind of pass. Every rank tries the same way in the same pass, and then takes what was faster for itself:
    messages are the same either way.

    Args:
        mark: a new timed mark on the caller's stream, with `query` and `elapsed_time` as an event's. The host never
            waits for one.
    """

    def __init__(self, mark: Callable[[], Any] | None = None) -> None:
        self.replays: bool | None = None
        self._mark = mark or _mark
        self._passes = 0
        self._timed: dict[bool, list[tuple[Any, Any]]] = {True: [], False: []}

    def run(self, replayed: Callable[[], T], eager: Callable[[], T]) -> T:
        """One pass, by either way."""
        self._judge()
        way, timed = self._next()
        start = self._mark() if timed else None
        found = replayed() if way else eager()
        if timed:
            self._timed[way].append((start, self._mark()))
        return found

    def _next(self) -> tuple[bool, bool]:
        """Whether the next pass is replayed, and timed."""
        number, self._passes = self._passes, self._passes + 1
        if self.replays is not None:
            return self.replays, False
        return next(((way, timed) for stop, way, timed in _PHASES if number < stop), (False, False))

    def _judge(self) -> None:
        if self.replays is not None or self._passes < SETTLED:
            return
        if not all(stop.query() for pairs in self._timed.values() for _, stop in pairs):
            return
        took = {way: statistics.median(a.elapsed_time(b) for a, b in pairs) for way, pairs in self._timed.items()}
        self.replays = took[True] <= took[False]
        self._timed.clear()
        logger.debug("attention takes %.3f ms replayed from a graph, %.3f ms as it is", took[True], took[False])


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
