"""A line every 5 seconds of work that takes long, with or without a terminal: it tells slow work from a hang."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

EVERY_S = 5.0


class Progress:
    """Logs a line every 5 s while its context is open: how far the work is, how long it has taken, and what is left.

    Args:
        what: the work, with which every line begins.
        total: what `advance` counts up to; 0 if that is unknown.
        unit: of what is counted, in the plural.
        told: whether anything is logged. One rank tells for all.
    """

    def __init__(self, what: str, total: float = 0, unit: str = "", told: bool = True) -> None:
        self.what, self.done = what, 0.0
        self._total, self._unit, self._told = total, unit, told
        self._ended = threading.Event()

    def __enter__(self) -> Progress:
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
        if self._told:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._told:
            self._thread.join()
            for _try in range(1000):  # the system's thread may end later, and a process with threads is not forked
                if not os.path.exists(f"/proc/self/task/{self._thread.native_id}"):
                    break
                time.sleep(1e-3)

    def advance(self, count: float = 1) -> None:
        """Count what has been done since the last call."""
        self.done += count

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, and count each of them when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    def line(self) -> str:
        """Return the line of now."""
        seconds = time.monotonic() - self._begun
        parts = [f"{duration(seconds)} so far"]
        if self.done:
            rate = self.done / seconds
            parts.append(f"{rate:,.0f} {self._unit}/s" if rate >= 100 else f"{rate:.3g} {self._unit}/s")
        if self._total:
            parts.insert(0, f"{self.done:,.0f} of {self._total:,.0f} {self._unit}")
        elif self.done:
            parts.insert(0, f"{self.done:,.0f} {self._unit}")
        if self.done and self._total > self.done:
            parts.append(f"about {duration(seconds / self.done * (self._total - self.done))} left")
        return f"{self.what}: {', '.join(parts)}"

    def _tell(self) -> None:
        while not self._ended.wait(EVERY_S):
            logger.info("%s", self.line())


def duration(seconds: float) -> str:
    """Return seconds in the unit that a reader expects."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.2g} s"
