"""Stopping on request: TERM, USR1 and INT ask the loop to checkpoint and end after the step under way."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Notes the first stop signal of this process. A second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
