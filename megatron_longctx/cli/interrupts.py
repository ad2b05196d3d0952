"""Ctrl-C where Python would lose it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
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
