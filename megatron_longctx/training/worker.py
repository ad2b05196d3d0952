"""The work of every rank: join the process group, build the model, load the checkpoint, train."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..config import Config
from ..config.gpus import uses_cuda
from .compose import config_from_dict
from .heartbeat import Heartbeat, enable_flight_recorder
from .ranks import interrupt_with_parent, parent_has_ended
from .rendezvous import RankInfo, connect_store, host_store, join_group
from .run_folder import RunFolder, RunLock, disk_full
from .signals import StopRequest

logger = logging.getLogger("megatron_longctx")


@dataclass(frozen=True)
class Job:
    """A training job that the preflight has accepted, which every rank runs."""

    config: Config  # with the mode that `parallelism.schedule=auto` chose
    world_size: int
    device: str  # `cpu` or `cuda`
    resumed_step: int | None  # of the checkpoint that the run resumes from; None for a new run
    mode_reason: str | None  # why `auto` chose the mode; None for other settings
    identity: dict[str, dict[str, Any]]  # what the samples and their order depend on (`mcore.data_identity`)

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
