"""Starts a training job: all ranks of this host, or this process as one rank of a torchrun or Slurm job."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ..config import Config
from ..config.gpus import other_nodes, uses_cuda
from ..config.progress import Progress
from ..core.errors import JobFailed
from ..core.kernels.providers import fa4
from . import forks, rendezvous, worker
from .compose import compose_config, load_config, override_config
from .heartbeat import enable_flight_recorder, last_operations, suspects
from .ranks import RankFailed, RankProcesses, broadcast_json, explain_failure, stopped_ranks
from .rendezvous import RankInfo
from .run_folder import RunFolder, RunLock
from .signals import SIGNALS, SignalForwarder, blocked

logger = logging.getLogger(__name__)

# After a failure, the other ranks have this long to end, and again after SIGTERM: a rank that hangs in a collective
# with a dead peer does not handle it.
_KILL_AFTER_S = 5.0
_RANK_0_HEAD_START_S = 3.0
_POLL_S = 0.2


def train(overrides: Sequence[str], resolved: Path | None = None) -> None:
    """Compose the configuration, refuse what cannot run, then train or resume.

    Args:
        overrides, resolved: settings, and a `resolved.yaml` to use instead of the recipes.

    Raises:
        ValueError: a job that cannot run.
        JobFailed: a rank failed.
    """
    place = RankInfo.from_environment(os.environ)
    try:
        config = composed(overrides, resolved)
    except ValueError:
        if place is None or place.rank == 0:
            raise
        _exit_after_rank_0()
    _hide_gpus(config)
    if place is None:
        _start_ranks(config)
    else:
        _join(config, place)


def preflight_only(config: Config, world_size: int, gpus: int | None = None) -> worker.Job:
    """Refuse what a job of `world_size` ranks would refuse, without asking a device. Start and write nothing.

    Args:
        gpus: of each of the nodes that the job will run on, which are not this host; None for this host.
    """
    if gpus is None:
        _hide_gpus(config)
        if config.train.device == "cuda" or uses_cuda(config.train.device):
            gpus = world_size
    with contextlib.nullcontext() if gpus is None else other_nodes(gpus):
        job = _accept(config, world_size)
    lock = RunFolder.of(config).lock
    if lock.exists():
        RunLock(lock).release()
    return job


def composed(overrides: Sequence[str], resolved: Path | None) -> Config:
    """Return the configuration of the recipes, or of `resolved`, a `resolved.yaml`, with `overrides`."""
    return compose_config(overrides) if resolved is None else override_config(load_config(resolved), overrides)


def _hide_gpus(config: Config) -> None:
    if config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron uses any GPU that it sees


def _start_ranks(config: Config) -> None:
    # Here, because Megatron takes seconds to import, and bad settings are refused first. Ranks are forks, and have it.
    with forks.without_cuda():
        with Progress("importing Megatron"):
            from . import auto, loop, preflight  # noqa: F401

        if torch.cuda.is_available() and forks.obstacle() is None:
            fa4.package_problem()  # imports it, which the check and Megatron-Core 0.16's ranks would each do
            job = forks.in_fork(_accept, config)  # it uses CUDA
        else:
            with forks.one_thread():
                job = _accept(config)
    folder = RunFolder.of(config)
    with folder.prepare(job.config, job.resumed_step, job.mode_reason) as lock:
        _run_ranks(job, folder, lock)


def _accept(config: Config, world_size: int | None = None) -> worker.Job:
    """Choose the mode, and refuse a job that cannot run. By default, its ranks are those to start on this host."""
    from . import auto, preflight

    with Progress("checking the job"):
        config, reason = auto.resolve_schedule(config)
        world_size = world_size or preflight.local_world_size(config)
        resumed_step, identity = preflight.check(config, world_size)
    return worker.Job(config, world_size, preflight.device_type(config), resumed_step, reason, identity)


def _run_ranks(job: worker.Job, folder: RunFolder, lock: RunLock) -> None:
    config, count = job.config, job.world_size
    with contextlib.ExitStack() as cleanup:
        # Ranks inherit the blocked signals: one that arrives before a rank handles it stays pending.
        with blocked(SIGNALS), rendezvous.listen() as listener:
            # Rank 0 hosts the store, not this process: ranks whose launcher dies must still write a checkpoint.
            logger.info("starting %d %s rank%s; run folder %s", count, job.device, "s" * (count > 1), folder.path)
            if obstacle := forks.obstacle():
                logger.info("ranks are not forks and start some seconds later, because %s", obstacle)
            how = "spawn" if obstacle else "fork"
            ranks = RankProcesses(worker.run_local, (job, listener, lock), range(count), start_method=how)
            cleanup.callback(ranks.kill)  # they hold the run's lock
            cleanup.callback(SignalForwarder(ranks.pids, saves=config.train.save).close)
        try:
            with Progress(f"starting {count} ranks"):  # until rank 0 tells what it does
                while 0 not in last_operations(folder) and not ranks.wait(_POLL_S):
                    pass
            ranks.wait()
        except RankFailed as error:
            stopped = stopped_ranks(ranks.pids)
            ranks.end(_KILL_AFTER_S)
            message = _with_cause(_reason(error, folder), folder, stopped, config)
            folder.status.fail(message)
            raise JobFailed(message) from None


def _with_cause(reason: str, folder: RunFolder, stopped: Sequence[int], config: Config) -> str:
    operations = last_operations(folder)
    return explain_failure(reason, stopped, config.parallelism.timeout_s, operations, suspects(operations.values()))


def _reason(error: RankFailed, folder: RunFolder) -> str:
    """Return why the job failed: the first error that a rank recorded, or the signal that killed a rank."""
    recorded = folder.first_error()
    if error.signal_name is None:
        return recorded or error.summary
    # NCCL's watchdog aborts a rank whose collective times out.
    hints = {"SIGKILL": "; out of memory? (see dmesg)", "SIGABRT": "; a collective's timeout? (see above)"}
    operation = last_operations(folder).get(error.rank)
    last = f", in {operation}" if operation else ""
    killed = f"{error.summary}{last}{hints.get(error.signal_name, '')}"
    return killed if recorded is None else f"{killed}\n{recorded}"


def _join(config: Config, place: RankInfo) -> None:
    """Run as one rank. Rank 0 checks the job, and all ranks use its configuration."""
    place.export(os.environ)
    limit = config.parallelism.timeout_s
    enable_flight_recorder(RunFolder.of(config).ranks)
    try:
        with Progress(f"waiting for {place.world_size} ranks", told=place.rank == 0):
            store = rendezvous.rendezvous_store(place, limit)
            rendezvous.join_group(place, store, limit, uses_cuda(config.train.device))
    except (RuntimeError, OSError) as error:
        address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise JobFailed(f"rank {place.rank} cannot join the other ranks at {address}: {error}") from None
    job, refusal = None, None
    if place.rank == 0:
        try:
            job = _accept(config, place.world_size)
            lock = RunFolder.of(config).prepare(job.config, job.resumed_step, job.mode_reason)
            atexit.register(lock.release)
            lock.keep_from_children()
        except ValueError as error:
            refusal = error
    accepted = broadcast_json(None if refusal or job is None else job.as_dict())
    if accepted is None:
        dist.destroy_process_group()
        if refusal:
            raise refusal
        _exit_after_rank_0()
    try:
        worker.run(worker.Job.from_dict(accepted))
    except Exception as error:
        folder = RunFolder.of(config)
        reason = folder.first_error(place.rank) or f"rank {place.rank} failed: {error}"
        raise JobFailed(_with_cause(reason, folder, [], config)) from None


def _exit_after_rank_0() -> NoReturn:
    """End a rank other than 0 of a refused job, after rank 0, which reports why: the first to end ends the others."""
    time.sleep(_RANK_0_HEAD_START_S)
    sys.exit(2)
