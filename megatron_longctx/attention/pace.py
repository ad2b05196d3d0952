"""Whether the host keeps ahead of the device in short passes, or has to replay them from a graph.

A pass as it is copies nothing, a replay copies its inputs and results but is launched at once. So passes run as they
are, unless the device runs out of work within them: then it is the host's launches that take the time.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_FIRST = 4
"""Passes that do not count: kernels are chosen and compiled, memory is set up."""
_WINDOW = 16
"""Passes that are judged together. A pass now and then may be late: after every step of a training job the host waits
for the device."""

SETTLED = _FIRST + 2 * _WINDOW
"""Passes after which those of a steady loop go the way that they go from then on."""


class Pace:
    """One kind of pass on one rank. `keeps`: the host has kept ahead; once it has not, this stays so."""

    def __init__(self) -> None:
        self.keeps = True
        self._passes = self._late = 0

    def note(self, starved: bool) -> None:
        """Take down a pass; `starved`: the device had nothing left to do within it."""
        self._passes += 1
        counted = self._passes - _FIRST
        if counted <= 0:
            return
        self._late += starved
        if counted % _WINDOW == 0:
            self.keeps = 2 * self._late < _WINDOW
            if not self.keeps:
                logger.debug(
                    "in %d of %d passes of attention the device waited for the host: they are replayed from a graph",
                    self._late, _WINDOW,
                )  # fmt: skip
            self._late = 0
