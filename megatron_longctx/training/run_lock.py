"""One job at a time in a run's folder."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import logging
import os
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from ..errors import refuse

logger = logging.getLogger(__name__)


class RunLock:
    """The right to write into a run's folder, until it is released or all processes that have it have ended.

    It is an `flock` of a file, which says who holds it. Processes that are started with this object have it too, so
    that ranks which outlive their launcher keep others out.

    Raises:
        ValueError: another job has it; names that one.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # plain: nothing closes it in passing
        host = os.uname().nodename
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                holder = self._said() or "another job"
                self._close()
                raise refuse(
                    "run.name",
                    path.parent.name,
                    f"a run that no other job is training; {holder} is training this one",
                    "Wait for it, stop it, or choose another run.name.",
                ) from None
            why = error.strerror or error
            logger.warning("%s cannot be locked (%s): make sure that no other job trains this run", path, why)
        else:
            if (earlier := self._said()) and not earlier.startswith(f"{host}, "):
                # Some file systems lock for the processes of one host only.
                logger.warning("%s trained this run and did not say that it ended: make sure that it has", earlier)
        since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        self._say(f"{host}, process {os.getpid()}, since {since}")

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give it back; processes that were started with it still have it."""
        if self._fd is not None:
            self._say("")
            self._close()

    def _said(self) -> str:
        assert self._fd is not None
        return os.pread(self._fd, 1000, 0).decode(errors="replace").strip()

    def _say(self, text: str) -> None:
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        with contextlib.suppress(OSError):  # on a full disk it is held without a name
            os.pwrite(self._fd, text.encode(), 0)

    def _close(self) -> None:
        assert self._fd is not None
        os.close(self._fd)
        self._fd = None

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._fd is not None, "released"
        return _inherited, (reduction.DupFd(self._fd),)


def _inherited(fd: Any) -> RunLock:
    lock = RunLock.__new__(RunLock)
    lock._fd = fd.detach()
    return lock
