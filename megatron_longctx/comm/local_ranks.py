"""Run a function on several ranks of this host, on gloo or NCCL, and explain why ranks failed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .rendezvous import RankInfo, connect_store, host_store, join_group, listen


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    threads: int | None = None,
    start_method: str = "spawn",
) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` new processes that form a process group, and return the results by rank.

    Args:
        fn: a picklable (module-level) function.
        timeout: in seconds, for each collective and for the whole run.
        backend: `gloo`, or `nccl` with a CUDA device per rank (or shared, see `gpus.RANKS_PER_GPU`).
        threads: the number of CPU threads per rank; None for an equal share of the cores.
        start_method: `spawn`, or `forkserver` for ranks that start with the modules that the server has imported.

    Raises:
        torch.multiprocessing.ProcessRaisedException: the traceback of the first rank that failed.
        TimeoutError: the ranks did not end in time and were killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = host_store(listen(), timeout)
        # Passed on explicitly, because a fork server's processes have the environment of the server's start.
        environment = {**os.environ, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        job = (fn, args, store.port, backend, timeout, threads, environment, folder)
        context = mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _rank_main, args=job, nprocs=world_size, join=False, start_method=start_method
        )
        deadline = time.monotonic() + timeout
        try:
            while not context.join(timeout=1.0, grace_period=2.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{world_size} ranks of {fn.__name__} did not end within {timeout} s")
        finally:  # if interrupted, for example: this process would wait for ranks that wait for each other
            for process in context.processes:
                process.kill()
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(world_size)]


def exit_with_parent() -> None:
    """Exit this process when its parent ends, in whatever way.

    Otherwise it could wait for other ranks until a collective times out, or still compute while the next job runs.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are child processes"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def stopped_ranks(pids: Sequence[int]) -> list[int]:
    """Return the positions in `pids` of processes that exist and are stopped (SIGSTOP), for which the others wait."""

    def stopped(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    return [rank for rank, pid in enumerate(pids) if stopped(pid)]


def explain_failure(
    message: str,
    stopped: Sequence[int],
    timeout_s: float,
    doing: Mapping[int, object] = {},
    suspects: str | None = None,
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


def _rank_main(
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    port: int,
    backend: str,
    timeout: float,
    threads: int | None,
    environment: dict[str, str],
    folder: str,
) -> None:
    exit_with_parent()
    gc.freeze()  # imported modules stay, so the collector need not visit them
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    place = RankInfo.local(rank, int(environment["WORLD_SIZE"]))
    join_group(place, connect_store(port, timeout), timeout, cuda=backend == "nccl")
    if threads is not None:
        torch.set_num_threads(threads)
    result = fn(rank, *args)
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
