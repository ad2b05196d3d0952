"""Stopping on request: TERM, USR1, HUP and INT ask the loop to checkpoint and end after the step under way."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def handled() -> tuple[signal.Signals, ...]:
    """The stop signals that are for us: `nohup` has HUP ignored, so that a job outlives its terminal."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP))


class StopRequest:
    """Notes the first stop signal of this process, one that has been waiting included. A second SIGINT interrupts."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interrupted = False
        for number in handled():
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the launcher starts ranks with these blocked

    def close(self) -> None:
        """Ignore stop signals from here on: the work is done, and Python would let them kill it while it ends."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.received = self.received or signal.Signals(number)
