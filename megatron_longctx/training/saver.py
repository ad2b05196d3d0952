"""A run's checkpoints, written while training continues, and handed to the user's command when they are complete."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import shlex
import signal
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


class Uploads:
    """Runs `train.upload_command` for finished checkpoints, one after another, in a thread of rank 0.

    A command that fails is reported with its last line; the checkpoint stays where it is and training goes on.

    Attributes:
        unfinished: the steps whose checkpoints are needed: their commands run or wait.
    """

    def __init__(self, command: str, folder: Path) -> None:
        self.unfinished: set[int] = set()
        self._command, self._folder, self._record = command, folder, folder / "uploaded.txt"
        self._queue: queue.Queue[tuple[int, Path] | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def resume(self, step: int, path: Path) -> None:
        """Run the command for the checkpoint that the run goes on from, unless it is the last that was uploaded."""
        if not self._record.exists() or self._record.read_text(encoding="utf-8").strip() != str(step):
            self.add(step, path)

    def add(self, step: int, path: Path) -> None:
        """Run the command for a finished checkpoint."""
        self.unfinished.add(step)
        self._queue.put((step, path))

    def close(self, wait: bool) -> None:
        """Wait for all commands, or end the one that runs: the next start of the run begins with the last again."""
        if steps := ", ".join(map(str, sorted(self.unfinished.copy()))):
            logger.info(
                "%s train.upload_command of step %s", "waiting for" if wait else "the next start repeats", steps
            )
        self._queue.put(None)
        while wait and self._thread.is_alive():  # a plain `join` would not let a second Ctrl-C interrupt
            self._thread.join(1.0)
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGTERM)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            begin, failure = time.perf_counter(), self._upload(*item)
            if failure is None:
                logger.info("uploaded step %d in %.1f s", item[0], time.perf_counter() - begin)
                files.write_text(self._record, f"{item[0]}\n")
            else:
                logger.warning("train.upload_command failed for step %d (%s); %s is safe", item[0], failure, item[1])
            self.unfinished.discard(item[0])

    def _upload(self, step: int, path: Path) -> str | None:
        """Run the command; return why it failed."""
        fields = {"path": str(path.resolve()), "name": path.name, "step": step, "run": self._folder.name}
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:  # in a session of its own: Ctrl-C in the terminal is for training
            words = [word.format(**fields) for word in shlex.split(self._command)]
            self._process = subprocess.Popen(words, start_new_session=True, text=True, errors="replace", **pipes)
        except (OSError, ValueError) as error:  # no such program, a format that a field does not have
            return str(error)
        last, code = self._process.communicate()[0].strip().rpartition("\n")[2], self._process.returncode
        self._process = None
        return f"exit code {code}: {last[:300]}" if code else None
