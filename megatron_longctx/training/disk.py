"""What to say when a disk is full: which one, and what of the run is safe."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..mcore.checkpoint_folder import iteration_directory, latest
from .run_folder import RunFolder

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REASONS = tuple(map(os.strerror, _FULL))
_OF_TORCH = ("unexpected pos", "iostream error", "PytorchStreamWriter failed")  # torch.save's, which does not say why


class DiskFull(OSError):
    """A write did not fit; the message says on which disk, and from where the run goes on."""


def disk_full(error: BaseException, run: RunFolder) -> DiskFull | None:
    """What to raise instead of `error`, where it comes of a disk or a quota that is full; else None."""
    why = next(filter(None, map(_reason, _causes(error))), None)
    if why is None:
        return None
    disk = run.path.resolve()
    while not os.path.ismount(disk):
        disk = disk.parent
    usage = shutil.disk_usage(disk)
    room = f"{usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB are free on {disk}"
    return DiskFull(f"{why}. {room}. {_safe(run.checkpoints)}")


def _reason(error: BaseException) -> str | None:
    line = str(error).partition("\n")[0]
    if getattr(error, "errno", None) in _FULL or any(reason in line for reason in _REASONS):
        return line
    return f"torch.save failed ({line})" if any(words in line for words in _OF_TORCH) else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _safe(checkpoints: Path) -> str:
    remedy = "Free space, or let train.keep_checkpoints keep fewer"
    try:
        last = latest(checkpoints)
    except ValueError:
        last = None
    if last is None:
        return f"There is no checkpoint yet. {remedy}; the same command then starts again."
    path = iteration_directory(checkpoints, last)
    size = sum(file.stat().st_size for file in path.iterdir())
    return f"{path} ({size / 2**20:,.0f} MiB) is safe. {remedy}; the same command then goes on from step {last}."
