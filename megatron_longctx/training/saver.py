"""A run's checkpoints, written while training continues."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..config import TrainConfig, files
from ..mcore import checkpoint, checkpoint_folder

logger = logging.getLogger(__name__)


class Saver:
    """Saves one checkpoint at a time. All methods but `wait_staged` and `written` are collective.

    Attributes:
        stall_s: seconds that training has waited for checkpoints.
        latest: the step of the newest checkpoint that has been begun.
        best: the lowest validation loss among the run's checkpoints, and its step (`train.keep_best`).
    """

    def __init__(self, directory: Path, train: TrainConfig, step: int) -> None:
        self.stall_s, self.latest = 0.0, step
        self.best = checkpoint_folder.best(directory) if train.keep_best else None
        if self.best is not None and self.best[1] > step:  # of steps that the run trains again
            self.best = None
        self._minutes, self._keep_best = train.save_minutes, train.keep_best
        self._directory = directory
        self._copies = checkpoint.HostCopies() if train.async_save else None
        self._retention = checkpoint.Retention(train.keep_checkpoints, train.keep_every)
        self._saving: checkpoint.PendingSave | None = None
        self._began = time.perf_counter()
        self._validation_loss: float | None = None

    @property
    def due(self) -> bool:
        """Whether `train.save_minutes` have passed since the last checkpoint was begun. The clocks of ranks differ."""
        return self._minutes is not None and time.perf_counter() - self._began >= 60 * self._minutes

    def begin(
        self, step: int, state: checkpoint.TrainingState, extra: Mapping[str, Any], validation_loss: float | None = None
    ) -> None:
        """Begin to save this step, with its validation loss if it has one. The previous checkpoint must be finished."""
        assert self._saving is None, "finish the previous checkpoint"
        # The best so far stays until the next save, so that a crash never leaves `best.json` without its checkpoint.
        kept = frozenset([self.best[1]] if self.best else [])
        with self._stalling():
            self._began, self.latest, self._validation_loss = time.perf_counter(), step, validation_loss
            retention = replace(self._retention, kept=kept)
            self._saving = checkpoint.begin(self._directory, step, state, extra, retention, copies=self._copies)

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
        self._note_best()
        return self.latest

    def _note_best(self) -> None:
        loss, lowest = self._validation_loss, self.best[0] if self.best else math.inf
        if not self._keep_best or loss is None or not loss < lowest:  # NaN is not
            return
        self.best = loss, self.latest
        if dist.get_rank() == 0:
            content = {"iteration": self.latest, "validation_loss": loss}
            files.write_text(self._directory / checkpoint_folder.BEST, json.dumps(content) + "\n")
        logger.info("step %d has the lowest validation loss of all checkpoints: %.5f", self.latest, loss)

    @contextlib.contextmanager
    def _stalling(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stall_s += time.perf_counter() - begin
