"""`runs/<name>/status.json`: what a run is doing, for launch scripts and for people who watch many runs."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

from .. import files

STATES = ("starting", "running", "stopped", "complete", "failed")
_EVERY_S = 5.0


class RunStatus:
    """One JSON object: `state` (of `STATES`), `step` of `steps`, `began` (the step this start went on from), `saved`
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
