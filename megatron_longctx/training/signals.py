"""Signals: on TERM, USR1, HUP or INT, a run finishes its step, writes a checkpoint and ends; on USR2, it goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from types import FrameType

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
SAVE_SIGNAL = signal.SIGUSR2
SIGNALS = (*STOP_SIGNALS, SAVE_SIGNAL)


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process handles: all, but not HUP if it is ignored, as under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP))


@contextlib.contextmanager
def blocked(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Block signals inside the context, in this process and in those that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    resource_tracker.ensure_running()  # its start, which the first child process would cause, unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.difference(numbers))


class StopRequest:
    """The first stop signal that this process received, also while it was blocked. A second SIGINT interrupts.

    `save` is whether the save signal has arrived; whoever saves resets it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.save = False
        self._interrupted = False
        for number in handled_signals():
            signal.signal(number, self._handle)
        signal.signal(SAVE_SIGNAL, self._ask_to_save)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher starts ranks with these blocked

    def close(self) -> None:
        """Ignore signals from now on: training is complete, and they would kill Python while it exits."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _ask_to_save(self, number: int, frame: FrameType | None) -> None:
        self.save = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.received = self.received or signal.Signals(number)


class SignalForwarder:
    """Forwards this process's signals to the ranks, SIGINT as SIGTERM. A second SIGINT interrupts.

    `saves` is whether a stopped run writes a checkpoint.
    """

    def __init__(self, pids: Sequence[int], saves: bool) -> None:
        self._pids, self._saves = pids, saves
        self._interrupted = False
        self._previous = {number: signal.signal(number, self._forward) for number in (*handled_signals(), SAVE_SIGNAL)}

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            how = "with a checkpoint" if self._saves else "without a checkpoint (train.save=false)"
            logger.info("interrupted: stopping after this step %s; once more to stop at once", how)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # it has already ended
                os.kill(pid, signal.SIGTERM if number == signal.SIGINT else number)


@contextlib.contextmanager
def interrupts_not_swallowed() -> Iterator[None]:
    """Let Ctrl-C interrupt where its exception is lost: in imports, where some modules catch it, and in destructors."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
                os.write(2, b"megatron-longctx: interrupted\n")
                os._exit(128 + number)
            frame = frame.f_back
        raise KeyboardInterrupt

    def lost(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            report_lost(unraisable)
            return
        # Once more, a little later, when the destructor has ended.
        again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not default or threading.current_thread() is not threading.main_thread():  # ignored, or another handler is set
        yield
        return
    report_lost, sys.unraisablehook = sys.unraisablehook, lost
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = report_lost
