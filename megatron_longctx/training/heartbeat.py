"""The current operation of every rank, in the run's folder: a killed, stopped or hanging rank cannot report it."""

import faulthandler
import json
import logging
import os
import re
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..config.progress import EVERY_S, duration
from .run_folder import RunFolder

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_SILENT_S = 5.0  # behind the newest heartbeat of any rank: more than a busy host takes
_PASSES = re.compile(r"step (\d+), (?:forward and backward|optimizer)")
_LINE_BYTES = 400  # every heartbeat overwrites the previous one


@dataclass(frozen=True)
class Operation:
    """What a rank does, as its heartbeat file stores it. Times are seconds since the epoch."""

    rank: int = 0
    operation: str = ""
    count: int = 0  # operations that the rank has begun. All ranks begin the same ones, so fewer means behind
    since: float = 0.0  # when it began
    alive: float = 0.0  # when the heartbeat was written
    most_s: float | None = None  # time limit in seconds; None for no limit

    def __str__(self) -> str:
        return f"{self.operation} since {_clock(self.since)}"


_current = Operation()
_EPOCH_S = time.time() - time.monotonic()


def _now() -> float:
    """Return the seconds since the epoch, by a clock that nobody sets while this process runs."""
    return _EPOCH_S + time.monotonic()


def begin(operation: str, most_s: float | None = None) -> None:
    """Set this rank's current operation.

    The heartbeat ends the process after `most_s` seconds, for operations that no collective's timeout ends.
    """
    global _current
    _current = Operation(0, operation, _current.count + 1, _now(), 0.0, most_s)


class Heartbeat:
    """A thread that writes this rank's current operation every second until `close`."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._folder, self._rank = folder, rank
        folder.ranks.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder.ranks / f"rank_{rank}.json", os.O_WRONLY | os.O_CREAT, 0o666)
        self._closed = threading.Event()
        self._told, self._first_step = (0, 0), ""
        begin("starting")
        self._write()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last operation and stop."""
        self._closed.set()
        self._thread.join()
        self._write()
        os.close(self._fd)

    def _beat(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            self._write()
            current = _current
            if self._rank == 0:
                self._tell(current)
            if current.most_s is not None and _now() - current.since > current.most_s:
                self._end_process(current)

    def _tell(self, current: Operation) -> None:
        """Log every 5 s what takes longer, except the passes of later steps, whose lines say how long they take."""
        step, seconds = _PASSES.match(current.operation), _now() - current.since
        self._first_step = self._first_step or (step[1] if step else "")
        told = (current.count, int(seconds / EVERY_S))
        if told[1] and told != self._told and (step is None or step[1] == self._first_step):
            self._told = told
            logger.info("%s: %s so far", current.operation, duration(seconds))

    def _write(self) -> None:
        line = json.dumps(asdict(replace(_current, rank=self._rank, alive=_now())))
        try:
            os.pwrite(self._fd, line.encode().ljust(_LINE_BYTES), 0)
        except OSError:
            return  # a full disk does not end training

    def _end_process(self, current: Operation) -> None:
        """End this process, whose main thread hangs."""
        self._folder.record_error(self._rank, TimeoutError(f"{current}: longer than {current.most_s:g} s"))
        with open(self._folder.errors / f"rank_{self._rank}_stacks.txt", "w") as stacks:
            faulthandler.dump_traceback(stacks)
        os._exit(1)


def last_operations(folder: RunFolder) -> dict[int, Operation]:
    """Return the last operation of every rank with a readable heartbeat, keyed by rank."""
    operations = {}
    for path in folder.ranks.glob("rank_*.json"):
        try:
            operation = Operation(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        operations[operation.rank] = operation
    return operations


def suspects(operations: Collection[Operation]) -> str | None:
    """Describe the ranks that the others may have waited for; None if no rank differs from the others."""
    if not operations:
        return None
    newest, fewest = max(each.alive for each in operations), min(each.count for each in operations)
    silent = [each for each in operations if newest - each.alive > _SILENT_S]
    if silent:
        return "; ".join(f"rank {each.rank} gave no sign after {_clock(each.alive)}, in {each}" for each in silent)
    behind = [each for each in operations if each.count == fewest]
    if len(behind) == len(operations):
        return None
    return "; ".join(f"rank {each.rank} was behind the others, in {each}" for each in behind)


def enable_flight_recorder(folder: Path) -> None:
    """Let PyTorch write every rank's last NCCL collectives into `folder` when one times out, for `torchfrtrace`.

    Call it before process groups are created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.resolve() / "collectives_rank_"),
    }.items():
        os.environ.setdefault(name, value)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
