"""Whether short passes run as they are or are replayed from a graph: both are timed in place, and the faster way stays.

A pass as it is copies nothing, but the host launches its operations one by one; a replay is launched at once, but
copies its inputs and results. Which takes less depends on the mode, on the host and on what runs around attention.
Whether the device has run out of work does not tell: one that waits at a flag for a slower rank looks busy.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")
Times = tuple[float, float]
"""Of a rank's passes, in ms: replayed, and as they are."""

_PHASES = (
    (8, False, False),  # kernels are chosen and compiled, memory is set up, and the host gets ahead again
    (8, False, True),  # before any replay: behind replays the device has work left, which hides what launches take
    (3, True, False),  # prepared, and captured once for each of the two memories that peers read
    (8, True, True),
)
"""Passes, whether they are replayed, and whether they are timed."""
_WAYS = tuple((replayed, timed) for passes, replayed, timed in _PHASES for _ in range(passes))
_FASTER = 0.98
"""Replays have to take less than so much of the time: they hold memory."""

SETTLED = len(_WAYS)
"""Passes after which all is timed. The next one begins with the ranks taking one way for good."""


class Pace:
    """One kind of pass on one rank.

    All ranks count the same passes, so that they try the same way in the same pass, and take one way together: were
    some of them slower, all would wait for these.

    Args:
        mark: a new timed mark on the caller's stream, with `synchronize` and `elapsed_time` (ms) as an event's.
        every: what all ranks give, which call this together. That is the only time that the host waits.

    Attributes:
        replays: the way that was taken; None as long as both are tried.
    """

    def __init__(self, mark: Callable[[], Any], every: Callable[[Times], Sequence[Times]]) -> None:
        self.replays: bool | None = None
        self._mark, self._every = mark, every
        self._passes = 0
        self._timed: dict[bool, list[tuple[Any, Any]]] = {True: [], False: []}

    def run(self, replayed: Callable[[], T], eager: Callable[[], T]) -> T:
        """One pass, by either way."""
        if self.replays is None and self._passes == SETTLED:
            self._judge()
        if self.replays is not None:
            return replayed() if self.replays else eager()
        way, timed = _WAYS[self._passes]
        self._passes += 1
        start = self._mark() if timed else None
        found = replayed() if way else eager()
        if timed:
            self._timed[way].append((start, self._mark()))
        return found

    def _judge(self) -> None:
        """Take the way that takes less in the mean over the ranks. Medians of each: where the host waits for the device
        once in every training step, the pass after that is slow in either way."""
        self._timed[True][-1][1].synchronize()
        took = {way: statistics.median(a.elapsed_time(b) for a, b in pairs) for way, pairs in self._timed.items()}
        replayed, eager = (
            statistics.fmean(times) for times in zip(*self._every((took[True], took[False])), strict=True)
        )
        self.replays = replayed < _FASTER * eager
        self._timed.clear()
        logger.debug(
            "passes of attention take %.3f ms replayed from a graph, %.3f ms as they are: %s from now on",
            replayed, eager, "replayed" if self.replays else "as they are",
        )  # fmt: skip


def timed_mark(device: torch.device) -> torch.cuda.Event:
    """A mark for `Pace` on the caller's stream."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
