"""What a run leaves in `runs/<name>/`."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from .. import files
from ..compose import RESOLVED, load_config, save_config
from ..config import Config
from ..errors import refuse
from .run_lock import RunLock

STATES = ("starting", "running", "stopped", "complete", "failed")
_EVERY_S = 5.0
_REMEDY = "Set run.root to a folder of yours on a disk with space."


class RunFolder:
    """Paths of one run: `resolved.yaml`, `status.json`, `metrics.jsonl`, `log.txt`, `lock`, `checkpoints/`, W&B's,
    errors of ranks and what they do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        return cls(Path(config.run.root, config.run.name))

    @property
    def resolved(self) -> Path:
        return self.path / RESOLVED

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def status(self) -> RunStatus:
        return RunStatus(self.path / "status.json")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    def prepare(self, config: Config, resumed_step: int | None, mode_reason: str | None = None) -> RunLock:
        """Write the run's configuration; an earlier, different one is kept under the step it was in force until.

        Args:
            mode_reason: why `parallelism.schedule=auto` took this mode, for `mode.txt`.

        Returns:
            the right to write into the folder, to be released at the job's end.

        Raises:
            ValueError: the folder cannot be written, or another job writes into it.
        """
        with contextlib.ExitStack() as failed:
            try:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                lock = failed.enter_context(RunLock(self.lock))
                self._prepare(config, resumed_step)
                if mode_reason is not None:
                    files.write_text(self.path / "mode.txt", mode_reason + "\n")
            except OSError as error:
                raise self.unusable(error, config.run.root) from error
            failed.pop_all()
        return lock

    def unusable(self, error: OSError, root: str) -> ValueError:
        """The refusal of a run whose folder in `root` cannot be used."""
        return refuse("run.root", root, f"to be able to write {self.path} ({error.strerror or error})", _REMEDY)

    def _prepare(self, config: Config, resumed_step: int | None) -> None:
        if self.resolved.is_file():
            try:
                unchanged = load_config(self.resolved) == config
            except ValueError:  # of another version, say: still the user's, so kept
                unchanged = False
            if not unchanged:
                kept = self.path / f"resolved.until_step_{resumed_step or 0}.yaml"
                self.resolved.replace(kept)
        save_config(config, self.resolved)
        self.status.begin(resumed_step or 0, config.train.steps)
        for old in (*self.errors.glob("*rank_*"), *self.ranks.glob("*rank_*")):
            old.unlink()

    def note_error(self, rank: int, error: BaseException) -> None:
        """Record why `rank` failed, if that can be written; the earliest note names who brought the job down."""
        text = "".join(traceback.format_exception(error))
        summary = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # what has failed is raised all the same
            self.errors.mkdir(parents=True, exist_ok=True)
            files.write_text(self._note_path(rank), f"{time.time():.6f}\n{summary}\n\n{text}")
            self.status.fail(f"rank {rank} failed: {summary}")

    def first_error(self) -> str | None:
        """The earliest note, as `rank k failed: …`; None if no rank left one."""
        notes = [(float(path.read_text().partition("\n")[0]), path) for path in self.errors.glob("rank_*[0-9].txt")]
        return self._told(min(notes)[1]) if notes else None

    def error_of(self, rank: int) -> str | None:
        """The note of `rank`, as `first_error` gives it; None if it left none."""
        path = self._note_path(rank)
        return self._told(path) if path.is_file() else None

    def _note_path(self, rank: int) -> Path:
        return self.errors / f"rank_{rank}.txt"

    @staticmethod
    def _told(path: Path) -> str:
        _, _, rest = path.read_text().partition("\n")
        summary = rest.split("\n\n", 1)[0]
        return f"{path.stem.replace('_', ' ')} failed: {summary}\n(its traceback: {path})"


class RunStatus:
    """`status.json`: what a run is doing, for launch scripts and for people who watch many runs.

    One JSON object: `state` (of `STATES`), `step` of `steps`, `began` (the step this start went on from), `saved`
    (that of the latest checkpoint), `signal` that stopped it, `message` of a failure, `job` and `restart` (Slurm's),
    `host`, `process`, `updated` (UTC).

    Rank 0 writes it, and a rank that fails. It is a convenience: one that cannot be written is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told_at = -_EVERY_S

    def read(self) -> dict[str, Any]:
        """What it says; nothing where there is none."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    def begin(self, step: int, steps: int) -> None:
        """A job has taken the run and goes on from `step`."""
        job = {name: os.environ.get(f"SLURM_{key}") for name, key in (("job", "JOB_ID"), ("restart", "RESTART_COUNT"))}
        who = {"host": os.uname().nodename, "process": os.getpid()}
        self._write({"state": "starting", "step": step, "steps": steps, "began": step, "saved": step} | job | who)

    def tell(self, state: str, step: int, **more: Any) -> None:
        """The run is in `state` at `step`. What is still running is told every few seconds only."""
        if state == "running" and not more and time.monotonic() < self._told_at + _EVERY_S:
            return
        self._told_at = time.monotonic()
        self._write(self.read() | {"state": state, "step": step} | more)

    def fail(self, message: str) -> None:
        """A rank failed. The first message of a start stays."""
        found = self.read()
        if found.get("state") != "failed":
            self._write(found | {"state": "failed", "message": message})

    def _write(self, facts: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):
            files.write_text(self.path, json.dumps(facts | {"updated": now}, indent=1) + "\n")
