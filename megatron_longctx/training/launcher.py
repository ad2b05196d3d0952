"""Starts a training job, all ranks of this host or this process as one rank of torchrun or Slurm, and runs the ranks.

A rank joins the process group, builds the model, loads the checkpoint and trains.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ..config import Config
from ..config.gpus import other_nodes, uses_cuda
from ..config.progress import Progress
from ..core.errors import JobFailed
from . import forks, rendezvous
from .compose import config_from_dict
from .heartbeat import Heartbeat, enable_flight_recorder, last_operations, suspects
from .ranks import (
    RankFailed,
    RankProcesses,
    broadcast_json,
    explain_failure,
    interrupt_with_parent,
    parent_has_ended,
    stopped_ranks,
)
from .rendezvous import RankInfo, connect_store, host_store, join_group
from .run_folder import RunFolder, RunLock, disk_full
from .signals import SIGNALS, SignalForwarder, StopRequest, blocked

logger = logging.getLogger(__name__)

# After a failure, the other ranks have this long to end, and again after SIGTERM: a rank that hangs in a collective
# with a dead peer does not handle it.
_KILL_AFTER_S = 5.0
_RANK_0_HEAD_START_S = 3.0
_POLL_S = 0.2


def train(config: Config) -> None:
    """Refuse what cannot run, then train or resume. Raises JobFailed: a rank failed."""
    _hide_gpus(config)
    if (place := RankInfo.from_environment(os.environ)) is None:
        _start_ranks(config)
    else:
        _join(config, place)


def preflight_only(config: Config, world_size: int, gpus: int | None = None) -> Job:
    """Refuse what a job of `world_size` ranks would refuse, without asking a device. Start and write nothing.

    `gpus` are those of each of the nodes that the job will run on, which are not this host; None for this host.
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


def _hide_gpus(config: Config) -> None:
    if config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron uses any GPU that it sees


def _start_ranks(config: Config) -> None:
    # Here, because Megatron takes seconds to import, and bad settings are refused first. Ranks are forks, and have it.
    forks.import_megatron(*(f"{__package__}.{name}" for name in ("auto", "loop", "preflight")))
    job = forks.checked(_accept, config)
    folder = RunFolder.of(config)
    with folder.prepare(job.config, job.resumed_step, job.mode_reason) as lock:
        _run_ranks(job, folder, lock)


def _accept(config: Config, world_size: int | None = None) -> Job:
    """Choose the mode, and refuse a job that cannot run. By default, its ranks are those to start on this host."""
    from . import auto, preflight

    with Progress("checking the job"):
        config, reason = auto.resolve_schedule(config)
        world_size = world_size or preflight.local_world_size(config)
        resumed_step, identity = preflight.check(config, world_size)
    return Job(config, world_size, preflight.device_type(config), resumed_step, reason, identity)


def _run_ranks(job: Job, folder: RunFolder, lock: RunLock) -> None:
    config, count = job.config, job.world_size
    with contextlib.ExitStack() as cleanup:
        # Ranks inherit the blocked signals: one that arrives before a rank handles it stays pending.
        with blocked(SIGNALS), rendezvous.listen() as listener:
            # Rank 0 hosts the store, not this process: ranks whose launcher dies must still write a checkpoint.
            logger.info("starting %d %s rank%s; run folder %s", count, job.device, "s" * (count > 1), folder.path)
            ranks = RankProcesses(run_local, (job, listener, lock), range(count), start_method=forks.start_method())
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
        exit_after_rank_0()
    try:
        run(Job.from_dict(accepted))
    except Exception as error:
        folder = RunFolder.of(config)
        reason = folder.first_error(place.rank) or f"rank {place.rank} failed: {error}"
        raise JobFailed(_with_cause(reason, folder, [], config)) from None


def exit_after_rank_0() -> NoReturn:
    """End a rank other than 0 of a refused job, after rank 0, which reports why: the first to end ends the others."""
    time.sleep(_RANK_0_HEAD_START_S)
    sys.exit(2)


@dataclass(frozen=True)
class Job:
    """A training job that the preflight has accepted, which every rank runs."""

    config: Config  # with the mode that `parallelism.schedule=auto` chose
    world_size: int
    device: str  # `cpu` or `cuda`
    resumed_step: int | None  # of the checkpoint that the run resumes from; None for a new run
    mode_reason: str | None  # why `auto` chose the mode; None for other settings
    identity: dict[str, dict[str, Any]]  # what the samples and their order depend on (`mcore.data.identity`)

    def as_dict(self) -> dict[str, Any]:
        """Return the job as JSON values, for `from_dict`."""
        return vars(self) | {"config": self.config.as_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Job:
        return cls(**{**values, "config": config_from_dict(values["config"])})


def run_local(local_rank: int, job: Job, listener: socket.socket, lock: RunLock) -> None:
    """Run a rank that the launcher started on this host.

    Rank 0 hosts the store at `listener`. This process holds the run's `lock` until it ends.
    """
    gc.freeze()  # a fork then copies fewer pages of the launcher
    if parent_has_ended():
        return  # it died while this rank was starting; from now on its death kills this rank
    lock.keep_from_children()
    place = RankInfo.local(local_rank, job.world_size)
    place.export(os.environ)
    os.environ["LOCAL_WORLD_SIZE"] = str(job.world_size)
    config, folder = job.config, RunFolder.of(job.config)
    try:
        limit = config.parallelism.timeout_s
        if local_rank == 0:
            store = host_store(listener, limit)
        else:
            port = int(listener.getsockname()[1])
            listener.close()  # otherwise connections would wait here once rank 0 has ended
            store = connect_store(port, limit)
        enable_flight_recorder(folder.ranks)
        join_group(place, store, limit, uses_cuda(config.train.device))
    except BaseException as error:
        folder.record_error(local_rank, error)
        raise
    run(job)


def run(job: Job) -> None:
    """Train as this rank of a joined process group. Record a failure in the run folder and raise it."""
    rank = dist.get_rank()
    folder = RunFolder.of(job.config)
    try:
        configure_logging(folder.log, rank)
        stop = StopRequest()
        heartbeat = Heartbeat(folder, rank)
        from .loop import Trainer  # here, so that a failing import of Megatron is recorded too

        # A name, so that it exists until the process group is destroyed.
        trainer = Trainer(job.config, folder, stop, job.identity)
        if multiprocessing.parent_process() is not None:
            # Until here the launcher's end kills a rank: it has nothing to save, and would wait for a dead one.
            interrupt_with_parent()
        trainer.train()
    except BaseException as error:
        full = disk_full(error, folder)
        folder.record_error(rank, full or error)
        if full is not None:
            raise full from error
        raise
    dist.barrier()
    heartbeat.close()
    dist.destroy_process_group()
    stop.close()


class _LogFile(logging.FileHandler):
    """Stops writing after the first error, with a warning: the console has the same lines."""

    def handleError(self, record: logging.LogRecord) -> None:
        logging.getLogger().removeHandler(self)
        logger.warning("%s cannot be written any more (%s)", self.baseFilename, sys.exc_info()[1])


def configure_logging(path: Path, rank: int) -> None:
    """Let rank 0 log to the console and to `path`; the others log only warnings, with their rank."""
    formatter = logging.Formatter("%(asctime)s %(message)s" if rank == 0 else f"rank {rank}: %(message)s", "%H:%M:%S")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if rank == 0:
        handlers.append(_LogFile(path))
    root = logging.getLogger()
    root.handlers.clear()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("megatron_longctx").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
