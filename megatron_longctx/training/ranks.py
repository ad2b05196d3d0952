"""Run one function on several ranks: on new processes of this host, or on the ranks that torchrun has started."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..config.gpus import max_gpu_ranks
from ..config.progress import Progress
from ..core.errors import JobFailed, refuse
from . import forks
from .rendezvous import RankInfo, connect_store, host_store, join_group, listen

Function = Callable[..., Any]
_KILLED_END_WITHIN_S = 5.0  # unless the kernel holds them, as in a file system that hangs
_GRACE_S = 2.0
_TRACEBACK_CHARS = 30_000  # less than a pipe takes without a reader


class RankFailed(Exception):
    """The process of a rank ended with an error.

    Args:
        exitcode: negative: the signal that killed it.
        traceback: of its exception; empty if it had none.

    Attributes:
        signal_name: the signal that killed it, as `SIGKILL`; None if none did.
        summary: a line: `rank 1 failed: ValueError: …`, `… was killed by SIGKILL` or `… ended with exit code 3`.
    """

    def __init__(self, rank: int, exitcode: int, traceback: str = "") -> None:
        self.rank = rank
        self.signal_name: str | None = None
        # The last line of a traceback is `module.Class: message`.
        kind, colon, message = traceback.rstrip().rpartition("\n")[2].partition(":")
        what = f"failed: {kind.rpartition('.')[2]}{colon}{message}" if kind else f"ended with exit code {exitcode}"
        if exitcode < 0:
            known = {int(number): number.name for number in signal.Signals}
            self.signal_name = known.get(-exitcode, f"signal {-exitcode}")
            what = f"was killed by {self.signal_name}"
        self.summary = f"rank {rank} {what}"
        super().__init__(f"{self.summary}\n{traceback}" if traceback else self.summary)


class RankProcesses:
    """New processes of this host that each run `fn(rank, *args)`.

    Their ends are seen by their exit codes: a pipe, such as a process's sentinel, stays open as long as any process
    that a rank has started.

    Args:
        fn: a picklable (module-level) function.
        start_method: of `multiprocessing`.
        daemon: whether Python ends them when this process exits.
    """

    def __init__(
        self,
        fn: Function,
        args: tuple[Any, ...],
        ranks: Iterable[int],
        start_method: str = "spawn",
        daemon: bool = False,
    ) -> None:
        context: Any = mp.get_context(start_method)
        self._ranks, self._lock = list(ranks), threading.Lock()
        self._reports: list[Connection] = []
        self._processes: list[Any] = []
        self._failed: RankFailed | None = None
        for rank in self._ranks:
            report, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank_process, args=(sender, fn, rank, args), daemon=daemon)
            process.start()
            sender.close()
            self._reports.append(report)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all have ended. Return whether they have, within `timeout` seconds.

        Raises RankFailed: one ended with an error, the first that was seen; the others may still run.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            codes = self._exit_codes()
            if self._failed is not None:
                raise self._failed
            running = [process.sentinel for process, code in zip(self._processes, codes, strict=True) if code is None]
            left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            if not running or left <= 0:
                return not running
            wait(running, left)

    def end(self, grace_s: float) -> None:
        """End the processes: after `grace_s` by SIGTERM, and after as long again by SIGKILL."""
        self._join(grace_s)
        self._signal(signal.SIGTERM)
        self._join(grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill the processes that still run."""
        self._signal(signal.SIGKILL)
        self._join(_KILLED_END_WITHIN_S)

    def _exit_codes(self) -> list[int | None]:
        """Return the exit code of each process, None while it runs, and keep the first failure."""
        with self._lock:  # of two threads, one would not see the exit code
            codes = [process.exitcode for process in self._processes]
            text = ""
            for rank, code, report in zip(self._ranks, codes, self._reports, strict=True):
                if code and self._failed is None:
                    with contextlib.suppress(EOFError):  # killed
                        text = report.recv() if report.poll() else ""
                    self._failed = RankFailed(rank, code, text)
        return codes

    def _signal(self, number: signal.Signals) -> None:
        for process, code in zip(self._processes, self._exit_codes(), strict=True):
            if code is None:
                with contextlib.suppress(ProcessLookupError):  # a fork server has seen its end first
                    os.kill(process.pid, number)

    def _join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while None in self._exit_codes() and time.monotonic() < deadline:
            time.sleep(0.02)


def _rank_process(report: Connection, fn: Function, rank: int, args: tuple[Any, ...]) -> None:
    mp._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    if parent_has_ended():  # before, while this process imported what `fn` needs
        return
    try:
        fn(rank, *args)
    except KeyboardInterrupt:
        pass  # the parent has ended, or the user interrupts: nobody reads what went wrong
    except Exception:
        report.send(traceback.format_exc()[-_TRACEBACK_CHARS:])
        sys.exit(1)


def run_ranks(
    fn: Function,
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    threads: int | None = None,
    start_method: str = "spawn",
    doing: str = "",
) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` new processes that form a process group, and return the results by rank.

    Raises RankFailed: the first rank that failed, with its traceback. Raises TimeoutError: the ranks did not end in
    time and were killed.

    Args:
        fn: a picklable (module-level) function.
        timeout: in seconds, for each collective and for the whole run.
        backend: `gloo`, or `nccl` with a CUDA device per rank (or shared, see `gpus.RANKS_PER_GPU`).
        threads: the number of CPU threads per rank; None for an equal share of the cores.
        start_method: `spawn`, or `forkserver` for ranks that start with the modules that the server has imported.
        doing: what lines of progress say that the ranks do; none without it.
    """
    with tempfile.TemporaryDirectory() as folder:
        listener = listen()
        # Passed on explicitly, because a fork server's processes have the environment of the server's start.
        environment = {**os.environ, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        job = (fn, args, listener, backend, timeout, threads, environment, folder)
        processes = RankProcesses(_rank_main, job, range(world_size), start_method)
        _store = host_store(listener, timeout)  # lives as long as the ranks
        try:
            with Progress(doing, told=bool(doing)):  # it starts a thread, which is no part of forks, as does the store
                ended = processes.wait(timeout)
            if not ended:
                raise TimeoutError(f"{world_size} ranks of {fn.__name__} did not end within {timeout} s")
        except RankFailed:
            processes.end(_GRACE_S)
            raise
        finally:  # if interrupted, for example: this process would wait for ranks that wait for each other
            processes.kill()
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(world_size)]


def exit_with_parent() -> None:
    """Exit this process when its parent ends in any way, even if this one is stopped.

    Otherwise it could wait for other ranks until a collective times out, or still compute while the next job runs.
    """
    mp._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are child processes"
    # The parent may have ended before, and that of a fork server's process is the server.

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def interrupt_with_parent() -> None:
    """Let the end of its parent interrupt this process from now on, instead of killing it: it has something to save."""
    mp._prctl_pr_set_pdeathsig(signal.SIGINT)  # type: ignore[attr-defined]


def parent_has_ended() -> bool:
    """Return whether the process that started this one has ended. (Its pipe to a fork is open in later forks too.)"""
    parent = multiprocessing.parent_process()
    return parent is not None and _state(parent.pid) in (None, psutil.STATUS_ZOMBIE)


def stopped_ranks(pids: Sequence[int]) -> list[int]:
    """Return the positions in `pids` of processes that exist and are stopped (SIGSTOP), for which the others wait."""
    return [rank for rank, pid in enumerate(pids) if _state(pid) == psutil.STATUS_STOPPED]


def _state(pid: int | None) -> str | None:
    """Return the state of a process, as psutil names it; None if it exists no more."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None


def explain_failure(
    message: str, stopped: Sequence[int], timeout_s: float, doing: Mapping[int, Any] = {}, suspects: str | None = None
) -> str:
    """Return the message of a failed rank, with the ranks that it may have waited for.

    Args:
        stopped: the ranks that were stopped at that time.
        doing: the last operations of ranks, if known.
        suspects: describes ranks that others may have waited for.
    """
    wait = f"a rank waits at most parallelism.timeout_s={timeout_s:g} s for the others"
    if stopped:
        each = [
            f"rank {rank} had been stopped (SIGSTOP)" + (f", in {doing[rank]}" if rank in doing else "")
            for rank in stopped
        ]
        return f"{'; '.join(each)}; {wait}\n{message}"
    if any(word in message.lower() for word in ("timed out", "timeout", "sigabrt")):
        named = f"{suspects}\n" if suspects else ""
        return f"{named}{message}\n{wait.capitalize()}: one of them hung, or took longer."
    return message


def quiet_fork() -> None:
    """Let a rank log warnings alone, as a process does that is no fork of a command."""
    logging.getLogger(__package__.partition(".")[0]).setLevel(logging.WARNING)


def _rank_main(rank: int, *job: Any) -> None:
    fn, args, listener, backend, timeout, threads, environment, folder = job
    exit_with_parent()
    gc.freeze()  # imported modules stay, so the collector need not visit them
    quiet_fork()
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    place = RankInfo.local(rank, int(environment["WORLD_SIZE"]))
    with listener:
        store = connect_store(listener.getsockname()[1], timeout)
    join_group(place, store, timeout, cuda=backend == "nccl")
    if threads is not None:
        torch.set_num_threads(threads)
    result = fn(rank, *args)
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


_TIMEOUT_S = 1800.0
_HEAD_BYTES = 512  # of a value's length and text, in the first message


@dataclass(frozen=True)
class Ranks:
    """The ranks that a function runs on: their number, and `cpu` or `cuda`."""

    count: int
    device: str

    @classmethod
    def of(cls, ranks: int | None, device: str, least: int = 2) -> Ranks:
        """Refuse fewer ranks than `least`, or more than GPUs. Under torchrun, the number of ranks is torchrun's.

        Args:
            ranks: None for one per GPU, or 2 on CPUs.
            device: `cpu`, `cuda`, or `auto` for CUDA if available.
            least: the fewest ranks that the function needs.
        """
        cuda = torch.cuda.is_available() and device != "cpu"
        if device == "cuda" and not cuda:
            raise refuse("device", device, "a CUDA device here; torch sees none", "Use CPUs.")
        gpus = max_gpu_ranks() if cuda else 0
        started = RankInfo.from_torchrun(os.environ)
        count = started.world_size if started else ranks or gpus or 2
        if count < least:
            raise refuse("ranks", count, f"{least} or more", "The measurement needs that many.")
        if cuda and started is None and count > gpus:
            raise refuse("ranks", count, f"at most {gpus}, the GPUs here", "Use fewer, or CPUs, or torchrun on hosts.")
        return cls(count, "cuda" if cuda else "cpu")

    @property
    def local_device(self) -> torch.device:
        """The device of the calling rank."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def run_on_ranks(ranks: Ranks, fn: Function, *args: Any) -> Any:
    """Run `fn(rank, *args)` on every rank and return rank 0's result. Torchrun's other ranks exit here.

    Raise a rank's ValueError as it is. Raises JobFailed: a rank failed otherwise.
    """
    place = RankInfo.from_torchrun(os.environ)
    if place is not None:
        with Progress(f"measuring on {ranks.count} ranks", told=place.rank == 0):
            join_group(place, None, _TIMEOUT_S, cuda=ranks.device == "cuda")
            result = fn(place.rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        if place.rank:
            sys.exit(0)
        return result
    backend = "nccl" if ranks.device == "cuda" else "gloo"
    if ranks.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        how, doing = forks.start_method(), f"measuring on {ranks.count} ranks"
        found = run_ranks(fn, ranks.count, *args, timeout=_TIMEOUT_S, backend=backend, start_method=how, doing=doing)
        return found[0]
    except RankFailed as error:
        _, refused, message = error.summary.partition(" failed: ValueError: ")
        raise (ValueError(message) if refused else JobFailed(error.summary)) from error
    except TimeoutError as error:
        raise JobFailed(str(error)) from error


def broadcast_json(value: Any = None, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast rank 0's JSON value to all ranks, tuples as lists. Every rank waits for all others.

    JSON, because unpickling can execute code. A short text takes one message.

    group: of all ranks; None for the job's.
    """
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    data = b""
    if dist.get_rank() == 0:
        text = json.dumps(value).encode()
        data = len(text).to_bytes(8, "little") + text
    head = torch.frombuffer(bytearray(data[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0")), dtype=torch.uint8).to(device)
    dist.all_reduce(head, group=group)
    found = head.cpu().numpy().tobytes()
    size = int.from_bytes(found[:8], "little") + 8
    if size > _HEAD_BYTES:
        rest = torch.frombuffer(bytearray(data[_HEAD_BYTES:] or size - _HEAD_BYTES), dtype=torch.uint8).to(device)
        dist.broadcast(rest, src=0, group=group)
        found += rest.cpu().numpy().tobytes()
    return json.loads(found[8:size])
