"""Ranks on this host, for as long as one function takes: `run_ranks(fn, world_size, ...)` on gloo or NCCL."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_HOST = "127.0.0.1"


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
        backend: `gloo` or `nccl` (rank r then uses CUDA device r).
        threads: of each rank's CPU operators; None for its share of the cores.
        start_method: `spawn`, or `forkserver` for ranks that begin with what the server has imported.

    Returns:
        what each rank returned, by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: the first failing rank's own traceback.
        TimeoutError: the ranks did not end in time; they are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The ranks meet at a port that is taken before they start: a free one may be gone by the time they bind it.
        store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        # A server's ranks would begin with the environment that it once had itself.
        environment = {
            **os.environ,
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(store.port),
        }
        job = (fn, args, world_size, backend, timeout, threads, environment, folder)
        context = mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _rank_main, args=job, nprocs=world_size, join=False, start_method=start_method
        )
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout)
        while not context.join(timeout=1.0, grace_period=2.0):
            if datetime.datetime.now() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{world_size} ranks of {fn.__name__} did not end within {timeout} s")
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


def _rank_main(
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    backend: str,
    timeout: float,
    threads: int | None,
    environment: dict[str, str],
    folder: str,
) -> None:
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // world_size))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=timeout)
    port = int(environment["MASTER_PORT"])
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    result = fn(rank, *args)
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
