"""A run's checkpoints, written while training continues."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..mcore import checkpoint

logger = logging.getLogger(__name__)


class Saver:
    """Saves one checkpoint at a time. All methods but `wait_staged` and `written` are collective.

    Attributes:
        stall_s: seconds that training has waited for checkpoints.
        latest: the step of the newest checkpoint that has been begun.
    """

    def __init__(self, directory: Path, train: TrainConfig, step: int) -> None:
        self.stall_s, self.latest = 0.0, step
        self._directory = directory
        self._copies = checkpoint.HostCopies() if train.async_save else None
        self._retention = checkpoint.Retention(train.keep_checkpoints, train.keep_every)
        self._saving: checkpoint.PendingSave | None = None
        self._began = 0.0

    def begin(self, step: int, state: checkpoint.TrainingState, extra: Mapping[str, Any]) -> None:
        """Begin to save this step. The previous checkpoint must be finished."""
        assert self._saving is None, "finish the previous checkpoint"
        with self._stalling():
            self._began, self.latest = time.perf_counter(), step
            self._saving = checkpoint.begin(self._directory, step, state, extra, self._retention, copies=self._copies)

    def wait_staged(self) -> None:
        """Wait until everything to be saved is copied; only then may training change it."""
        if self._saving is not None:
            with self._stalling():
                self._saving.wait_staged()

    @property
    def written(self) -> bool:
        """Whether this rank has written everything."""
        return self._saving is None or self._saving.written

    def finish(self) -> int | None:
        """Wait until the checkpoint is written and make it the latest. Return its step, or None without one."""
        if self._saving is None:
            return None
        saving, self._saving = self._saving, None
        before = self.stall_s
        with self._stalling():
            path = saving.finish()
        seconds = time.perf_counter() - self._began
        logger.info("saved %s in %.1f s, the last %.1f s waited for", path, seconds, self.stall_s - before)
        return self.latest

    @contextlib.contextmanager
    def _stalling(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stall_s += time.perf_counter() - begin
