"""Ranks on this host, for as long as one function takes: `run_ranks(fn, world_size, ...)` on gloo or NCCL."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .rendezvous import Placement, host_store, join, join_store, listen


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    threads: int | None = None,
    start_method: str = "spawn",
) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` fresh processes joined in one process group.

    Args:
        fn: a picklable (module-level) function.
        world_size: number of ranks.
        timeout: seconds a collective, and the whole run, may take.
        backend: `gloo`, or `nccl` with a CUDA device for each rank (or for several, see `gpus.RANKS_PER_GPU`).
        threads: of each rank's CPU operators; None for its share of the cores.
        start_method: `spawn`, or `forkserver` for ranks that begin with what the server has imported.

    Returns:
        what each rank returned, by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: the first failing rank's own traceback.
        TimeoutError: the ranks did not end in time; they are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = host_store(listen(), timeout)
        # A server's ranks would begin with the environment that it once had itself.
        environment = {**os.environ, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        job = (fn, args, store.port, backend, timeout, threads, environment, folder)
        context = mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _rank_main, args=job, nprocs=world_size, join=False, start_method=start_method
        )
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout)
        try:
            while not context.join(timeout=1.0, grace_period=2.0):
                if datetime.datetime.now() > deadline:
                    raise TimeoutError(f"{world_size} ranks of {fn.__name__} did not end within {timeout} s")
        finally:  # interrupted, for one: this process would wait for ranks that wait for each other
            for process in context.processes:
                process.kill()
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(world_size)]


def end_with_parent() -> None:
    """See that this rank ends as soon as the process that has started it does, however that one ends: it might wait for
    others for as long as a collective may take, or compute on beside the next job."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by another process"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def stopped_ranks(pids: Sequence[int]) -> list[int]:
    """Which of these processes, by their place in the list, exist and are stopped: the others wait for them."""

    def stopped(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    return [rank for rank, pid in enumerate(pids) if stopped(pid)]


def with_cause(
    said: str, stopped: Sequence[int], timeout_s: float, doing: Mapping[int, object] = {}, suspects: str | None = None
) -> str:
    """What a rank said as it failed, with what it may have waited for.

    Args:
        stopped: ranks that were, then.
        doing: what ranks did last, where that is known.
        suspects: which ranks others may have waited for, in words.
    """
    wait = f"a rank waits at most parallelism.timeout_s={timeout_s:g} s for the others"
    if stopped:
        each = [
            f"rank {rank} had been stopped (SIGSTOP)" + (f", in {doing[rank]}" if rank in doing else "")
            for rank in stopped
        ]
        return f"{'; '.join(each)}; {wait}\n{said}"
    if any(word in said.lower() for word in ("timed out", "timeout", "sigabrt")):
        named = f"{suspects}\n" if suspects else ""
        return f"{named}{said}\n{wait.capitalize()}: one of them hung, or took longer."
    return said


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
    end_with_parent()
    gc.freeze()  # what is imported stays: no collection need look at it
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    place = Placement.local(rank, int(environment["WORLD_SIZE"]))
    join(place, join_store(port, timeout), timeout, cuda=backend == "nccl")
    if threads is not None:
        torch.set_num_threads(threads)
    result = fn(rank, *args)
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
