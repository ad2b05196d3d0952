"""A run's checkpoints, written while training continues, and handed to the user's command when they are complete."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping
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
        self,
        step: int,
        state: checkpoint.TrainingState,
        extra: Mapping[str, Any],
        validation_loss: float | None = None,
        in_use: Collection[int] = (),
    ) -> None:
        """Begin to save this step. The previous checkpoint must be finished.

        Args:
            validation_loss: that of this step, if it has one.
            in_use: steps whose checkpoints may not be deleted yet; only rank 0's count.
        """
        assert self._saving is None, "finish the previous checkpoint"
        # The best so far stays until the next save, so that a crash never leaves `best.json` without its checkpoint.
        kept = frozenset([*in_use, *([self.best[1]] if self.best else [])])
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
        loss = self._validation_loss
        if not self._keep_best or loss is None or (self.best is not None and self.best[0] <= loss):
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


class Uploads:
    """Runs `train.upload_command` for finished checkpoints, one after another, in a thread of rank 0.

    A command that fails is reported with its last line; the checkpoint stays where it is and training goes on.

    Attributes:
        unfinished: the steps whose checkpoints are needed: their commands run or wait.
    """

    def __init__(self, command: str, run: str) -> None:
        self.unfinished: set[int] = set()
        self._command, self._run_name = command, run
        self._queue: queue.Queue[tuple[int, Path] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def add(self, step: int, path: Path) -> None:
        """Run the command for a finished checkpoint."""
        self.unfinished.add(step)
        self._queue.put((step, path))

    def close(self) -> None:
        """Wait for all commands."""
        if steps := ", ".join(map(str, sorted(self.unfinished.copy()))):
            logger.info("waiting for train.upload_command of step %s", steps)
        self._queue.put(None)
        while self._thread.is_alive():  # a plain `join` would not let a second Ctrl-C interrupt
            self._thread.join(1.0)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            begin, failure = time.perf_counter(), self._upload(*item)
            if failure is None:
                logger.info("uploaded step %d in %.1f s", item[0], time.perf_counter() - begin)
            else:
                logger.warning("train.upload_command failed for step %d (%s); %s is safe", item[0], failure, item[1])
            self.unfinished.discard(item[0])

    def _upload(self, step: int, path: Path) -> str | None:
        """Run the command; return why it failed."""
        fields = {"path": str(path.resolve()), "name": path.name, "step": step, "run": self._run_name}
        options: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
        try:  # in a session of its own: Ctrl-C in the terminal is for training
            words = [word.format(**fields) for word in shlex.split(self._command)]
            done = subprocess.run(words, start_new_session=True, **options)
        except (OSError, ValueError) as error:  # no such program, a format that a field does not have
            return str(error)
        last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        return f"exit code {done.returncode}: {last[:300]}" if done.returncode else None
