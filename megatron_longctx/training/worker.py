"""What every rank runs: joins the group, builds the model, loads the checkpoint, trains."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm.rendezvous import RankInfo, connect_store, host_store, join_group
from ..compose import load_config
from ..config import Config
from .disk import disk_full
from .heartbeat import Heartbeat, record_collectives
from .run_folder import RunFolder
from .run_lock import RunLock
from .signals import StopRequest

logger = logging.getLogger("megatron_longctx")


def spawned(local_rank: int, world_size: int, listener: socket.socket, run_folder: str, lock: RunLock) -> None:
    """Entry of a rank that the launcher started on this host. listener: where the ranks meet; rank 0 hosts them.
    lock: of the run, which the rank has until it ends."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        return  # it died while this rank was starting; from here on its death arrives as SIGINT
    os.environ.update(
        RANK=str(local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    folder = RunFolder(Path(run_folder))
    try:
        config = load_config(folder.resolved)
        limit = config.parallelism.timeout_s
        if local_rank == 0:
            store = host_store(listener, limit)
        else:
            port = int(listener.getsockname()[1])
            listener.close()  # nobody would answer there once rank 0 has ended
            store = connect_store(port, limit)
        record_collectives(folder.ranks)
        join_group(RankInfo.local(local_rank, world_size), store, limit, uses_cuda(config))
    except BaseException as error:
        folder.note_error(local_rank, error)
        raise
    run(config)


def uses_cuda(config: Config) -> bool:
    return torch.cuda.is_available() and config.train.device != "cpu"


def run(config: Config) -> None:
    """Train as this rank, in a joined group. A failure is noted in the run folder before it ends the process."""
    rank = dist.get_rank()
    folder = RunFolder.of(config)
    _log_to(folder.log, rank)
    stop = StopRequest()
    heartbeat = Heartbeat(folder, rank)
    try:
        from .loop import Trainer  # here, so that Megatron's import failing is this rank's noted error too

        trainer = Trainer(config, folder, stop)
        trainer.train()
    except BaseException as error:
        full = disk_full(error, folder)
        folder.note_error(rank, full or error)
        if full is not None:
            raise full from error
        raise
    dist.barrier()
    heartbeat.close()
    stop.close()
    dist.destroy_process_group()


class _LogFile(logging.FileHandler):
    """Gives up where nothing can be written, after a last word: the console has the same lines."""

    def handleError(self, record: logging.LogRecord) -> None:
        logging.getLogger().removeHandler(self)
        logger.warning("%s cannot be written any more (%s)", self.baseFilename, sys.exc_info()[1])


def _log_to(path: Path, rank: int) -> None:
    """Rank 0 logs to the console and the run's log; the others only warnings, with their number."""
    form = logging.Formatter("%(asctime)s %(message)s" if rank == 0 else f"rank {rank}: %(message)s", "%H:%M:%S")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if rank == 0:
        handlers.append(_LogFile(path))
    root = logging.getLogger()
    root.handlers.clear()
    for handler in handlers:
        handler.setFormatter(form)
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("megatron_longctx").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
