"""What every rank of a run is doing, in its folder: one that is killed, stopped or hangs can say nothing itself."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .run_folder import RunFolder

_PERIOD_S = 1.0
_SILENT_S = 5.0  # behind the others' last sign: more than a busy host takes
_LINE = 400  # bytes; every sign overwrites the one before


@dataclass(frozen=True)
class Doing:
    """An operation, and how many there were before it: ranks do the same ones. most_s: that it may take. alive: when
    the rank gave its last sign. Times are those of `time.time`."""

    rank: int = 0
    operation: str = ""
    count: int = 0
    since: float = 0.0
    alive: float = 0.0
    most_s: float | None = None

    def __str__(self) -> str:
        return f"{self.operation} since {_clock(self.since)}"


_now = Doing()


def at(operation: str, most_s: float | None = None) -> None:
    """Say what this rank does from now on. most_s: seconds after which the rank ends, for what no collective's timeout
    ends."""
    global _now
    _now = Doing(0, operation, _now.count + 1, time.time(), 0.0, most_s)


class Heartbeat:
    """A thread that writes this rank's operation, as `at` has it, until `close`."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._folder, self._rank = folder, rank
        folder.ranks.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder.ranks / f"rank_{rank}.json", os.O_WRONLY | os.O_CREAT, 0o666)
        self._ended = threading.Event()
        at("starting")
        self._write()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last operation and stop."""
        self._ended.set()
        self._thread.join()
        self._write()
        os.close(self._fd)

    def _beat(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self._write()
            now = _now
            if now.most_s is not None and time.time() - now.since > now.most_s:
                self._end(now)

    def _write(self) -> None:
        line = json.dumps(asdict(replace(_now, rank=self._rank, alive=time.time())))
        try:
            os.pwrite(self._fd, line.encode().ljust(_LINE), 0)
        except OSError:
            return  # a full disk: training may go on

    def _end(self, now: Doing) -> None:
        """End this process, whose main thread hangs."""
        error = TimeoutError(f"{now}: longer than {now.most_s:g} s")
        self._folder.note_error(self._rank, error)
        with open(self._folder.errors / f"rank_{self._rank}_stacks.txt", "w") as stacks:
            faulthandler.dump_traceback(stacks)
        os._exit(1)


def last_operations(folder: RunFolder) -> dict[int, Doing]:
    """By rank, where it has said something."""
    found = {}
    for path in folder.ranks.glob("rank_*.json"):
        try:
            doing = Doing(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        found[doing.rank] = doing
    return found


def suspects(doing: Collection[Doing]) -> str | None:
    """Which ranks the others may have waited for, in words; None where they do not differ."""
    if not doing:
        return None
    newest, least = max(each.alive for each in doing), min(each.count for each in doing)
    silent = [each for each in doing if newest - each.alive > _SILENT_S]
    if silent:
        return "; ".join(f"rank {each.rank} gave no sign after {_clock(each.alive)}, in {each}" for each in silent)
    behind = [each for each in doing if each.count == least]
    if len(behind) == len(doing):
        return None
    return "; ".join(f"rank {each.rank} was behind the others, in {each}" for each in behind)


def record_collectives(folder: Path) -> None:
    """Have PyTorch write the last collectives of every rank of NCCL where one times out, for its `torchfrtrace`. Before
    groups are made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.resolve() / "collectives_rank_"),
    }.items():
        os.environ.setdefault(name, value)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
