"""A run's folder `runs/NAME/`: its paths, status and lock, errors of its ranks, and reports of a full disk."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import shutil
import stat
import time
import traceback
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from ..config import Config, files
from ..core.errors import refuse
from .compose import RESOLVED, load_config, save_config

logger = logging.getLogger(__name__)

_STATUS_PERIOD_S = 5.0
_HOLDER_BYTES = 300  # spaces fill the rest
_MAX_STATUS_BYTES = 2**20  # a failure's message may be long
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_DISK_REASONS = tuple(map(os.strerror, _FULL_DISK))
_TORCH_SAVE_FAILED = ("unexpected pos", "iostream error", "PytorchStreamWriter failed")  # it does not report the cause


class RunFolder:
    """The paths of one run, and the small files that describe its state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.resolved = path / RESOLVED
        self.metrics, self.log, self.lock = path / "metrics.jsonl", path / "log.txt", path / "lock"
        self.checkpoints, self.errors, self.ranks = path / "checkpoints", path / "errors", path / "ranks"
        self.status = RunStatus(path / "status.json")

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        return cls(Path(config.run.root, config.run.name))

    def prepare(self, config: Config, resumed_step: int | None, mode_reason: str | None = None) -> RunLock:
        """Lock the folder and write the run's configuration. Return the lock, for the caller to release.

        An earlier, different configuration is kept, named after the step until which it was used. Refuse a folder that
        cannot be written or that another job has locked. `mode_reason`: why `parallelism.schedule=auto` chose the mode.
        """
        with contextlib.ExitStack() as on_failure:
            try:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                lock = on_failure.enter_context(RunLock(self.lock))
                self._prepare(config, resumed_step or 0)
                if mode_reason is not None:
                    files.write_text(self.path / "mode.txt", mode_reason + "\n")
            except OSError as error:
                raise self.unusable(error, config.run.root) from error
            on_failure.pop_all()
        return lock

    def unusable(self, error: OSError, root: str) -> ValueError:
        """Return the refusal of a run whose folder in `root` cannot be used."""
        remedy = "Set run.root to a folder of yours on a disk with space."
        return refuse("run.root", root, f"to be able to write {self.path} ({error.strerror or error})", remedy)

    def _prepare(self, config: Config, step: int) -> None:
        if self.log.exists():
            self.log.open("a").close()  # as rank 0 will
        if self.resolved.is_file():
            try:
                unchanged = load_config(self.resolved) == config
            except ValueError:  # written by another version, for example: still the user's, so keep it
                unchanged = False
            if not unchanged:
                self.resolved.replace(self.path / f"resolved.until_step_{step}.yaml")
        save_config(config, self.resolved)
        self.status.start(step, config.train.steps)
        for old in (*self.errors.glob("*rank_*"), *self.ranks.glob("*rank_*")):
            old.unlink()

    def record_error(self, rank: int, error: BaseException) -> None:
        """Write why `rank` failed, if possible. The earliest record names the rank that ended the job."""
        text = "".join(traceback.format_exception(error))
        summary = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # the caller raises `error` in any case
            self.errors.mkdir(parents=True, exist_ok=True)
            files.write_text(self.errors / f"rank_{rank}.txt", f"{time.time():.6f}\n{summary}\n\n{text}")
            self.status.fail(f"rank {rank} failed: {summary}")

    def first_error(self, rank: int | None = None) -> str | None:
        """Return the earliest recorded error, or that of `rank`, as `rank k failed: …`; None if there is none."""
        found = []
        for path in self.errors.glob("rank_*[0-9].txt" if rank is None else f"rank_{rank}.txt"):
            when, _, rest = path.read_text().partition("\n")
            summary = rest.split("\n\n", 1)[0]
            found.append((float(when), f"{path.stem.replace('_', ' ')} failed: {summary}\n(its traceback: {path})"))
        return min(found)[1] if found else None


class RunStatus:
    """`status.json`: the state of a run, for launch scripts and for people who watch many runs.

    One JSON object: `state` (starting, running, stopped, complete or failed), `step` of `steps`, `began` (the step at
    which this start resumed), `saved` (the step of the latest checkpoint), `signal` that stopped it, `message` of a
    failure, `job` and `restart` (Slurm's), `host`, `process`, `updated` (UTC).

    Rank 0 writes it, and a rank that fails. A run does not need it: errors of writing it are ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._updated_at = -_STATUS_PERIOD_S

    def read(self) -> dict[str, Any]:
        """Return the content, or an empty dict if there is none."""
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(files.read_bytes(self.path, _MAX_STATUS_BYTES))
            return content if isinstance(content, dict) else {}
        return {}

    def start(self, step: int, steps: int) -> None:
        """Replace the content: a job starts at `step`."""
        job = {name: os.environ.get(f"SLURM_{key}") for name, key in (("job", "JOB_ID"), ("restart", "RESTART_COUNT"))}
        process = {"host": os.uname().nodename, "process": os.getpid()}
        self._write({"state": "starting", "step": step, "steps": steps, "began": step, "saved": step} | job | process)

    def update(self, state: str, step: int, **more: Any) -> None:
        """Write the state, but a mere step of a running run only every few seconds."""
        if state == "running" and not more and time.monotonic() < self._updated_at + _STATUS_PERIOD_S:
            return
        self._updated_at = time.monotonic()
        self._write(self.read() | {"state": state, "step": step} | more)

    def fail(self, message: str) -> None:
        """Write that a rank failed. The first message since the start is kept."""
        content = self.read()
        if content.get("state") != "failed":
            self._write(content | {"state": "failed", "message": message})

    def _write(self, content: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):
            files.write_text(self.path, json.dumps(content | {"updated": now}, indent=1) + "\n")


class RunLock:
    """The exclusive right to write into a run's folder.

    It is an `flock` of a file that names its holder. It is held until `release`, or until all processes that have it
    have ended. Pickling passes it to a process being started, so ranks that outlive their launcher keep others out.

    Refuse one that another job holds, and name that job. Raises OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        if path.is_symlink():
            raise OSError(errno.ELOOP, f"{path.name} is a link to {os.readlink(path)}: delete it")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o666)  # no file object: nothing else may close it
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            self._close()
            raise OSError(errno.EEXIST, f"{path.name} is not a file of its own: delete it")
        host = os.uname().nodename
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                holder = self._read_holder() or host
                if here := _processes_with(path):
                    holder += f" (its lock is held on this host by process {', '.join(map(str, here))})"
                self._close()
                expected = f"a run that no other job is training; {holder} is training this one"
                remedy = "Wait for it, stop it, or choose another run.name."
                raise refuse("run.name", path.parent.name, expected, remedy) from None
            why = error.strerror or error
            logger.warning("%s cannot be locked (%s): make sure that no other job trains this run", path, why)
        else:
            if (earlier := self._read_holder()) and not earlier.startswith(f"{host}, "):
                # Some file systems lock only among the processes of one host.
                logger.warning("%s trained this run and did not report its end: make sure that it has ended", earlier)
        since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        self._write_holder(f"{host}, process {os.getpid()}, since {since}")

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release it in this process; processes that were started with it still hold it."""
        if self._fd >= 0:
            self._write_holder("")
            self._close()

    def keep_from_children(self) -> None:
        """Close it in the processes that this one forks, such as data workers: one that outlives the job keeps none."""
        os.register_at_fork(after_in_child=self._close)

    def _read_holder(self) -> str:
        return os.pread(self._fd, 1000, 0).decode(errors="replace").strip()

    def _write_holder(self, text: str) -> None:
        with contextlib.suppress(OSError):  # on a full disk, the lock does not name its holder
            os.pwrite(self._fd, text.encode().ljust(_HOLDER_BYTES), 0)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __getstate__(self) -> Any:
        assert self._fd >= 0, "released"
        return reduction.DupFd(self._fd)

    def __setstate__(self, inherited: Any) -> None:
        self._fd = inherited.detach()


def _processes_with(path: Path) -> list[int]:
    """Return the processes of this host that have a file open, as far as this user may know, but for this one."""
    target, found = str(path.resolve()), set()
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(fd) == target:
                found.add(int(fd.parts[2]))
    return sorted(found - {os.getpid()})


class DiskFull(OSError):
    """A write that did not fit. The message names the disk and the step at which the run can resume."""


def disk_full(error: BaseException, run: RunFolder) -> DiskFull | None:
    """Return the error to raise instead of `error` if a full disk or quota caused it, otherwise None."""
    cause: BaseException | None = error
    causes = []
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    why = next(filter(None, map(_full_disk_reason, causes)), None)
    if why is None:
        return None
    disk = run.path.resolve()
    while not os.path.ismount(disk):
        disk = disk.parent
    usage = shutil.disk_usage(disk)
    space = f"{usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB are free on {disk}"
    return DiskFull(f"{why}. {space}. {_safe_checkpoint(run.checkpoints)}")


def _full_disk_reason(error: BaseException) -> str | None:
    line = str(error).partition("\n")[0]
    if getattr(error, "errno", None) in _FULL_DISK or any(reason in line for reason in _FULL_DISK_REASONS):
        return line
    return f"torch.save failed ({line})" if any(words in line for words in _TORCH_SAVE_FAILED) else None


def _safe_checkpoint(checkpoints: Path) -> str:
    from ..mcore.checkpoint_folder import iteration_directory, latest  # imports Megatron, which takes seconds

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
