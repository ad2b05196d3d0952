"""Starts a training job: on this host by itself, or as one rank of what torchrun or Slurm has started."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import FrameType
from typing import NoReturn

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from ..compose import compose_config
from ..config import Config
from . import auto, preflight, worker
from .run_folder import RunFolder
from .run_lock import RunLock
from .signals import STOP_SIGNALS

logger = logging.getLogger(__name__)

# After a failure, the other ranks get this long to end by themselves, and again after SIGTERM: a rank that hangs in a
# collective with a dead peer does not hear it.
_KILL_AFTER_S = 5.0
_LET_RANK_ZERO_SPEAK_S = 3.0


class JobFailed(RuntimeError):
    """A rank failed; the message is that rank's own."""


@dataclass(frozen=True)
class Placement:
    """This process among the ranks that somebody else has started."""

    rank: int
    world_size: int
    local_rank: int


def placement(env: dict[str, str]) -> Placement | None:
    """Who this process is under torchrun or inside a Slurm step of several tasks; None when it has to start the ranks.

    Raises:
        ValueError: a Slurm step without MASTER_ADDR and MASTER_PORT.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return Placement(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0")))
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in env:
                raise ValueError(
                    f"{name} is not set: expected the first node and a free port. See launch/train.sbatch."
                )
        return Placement(int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"]))
    return None


def train(overrides: Sequence[str]) -> None:
    """Compose the configuration once, refuse what cannot run, then train or resume.

    Raises:
        ValueError: a job that cannot run.
        JobFailed: a rank failed.
    """
    place = placement(dict(os.environ))
    try:
        config = compose_config(overrides)
    except ValueError:
        if place is None or place.rank == 0:
            raise
        _refused()
    if config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron takes a GPU wherever it sees one
    if place is None:
        _start_ranks(config)
    else:
        _join(config, place)


def _start_ranks(config: Config) -> None:
    config = auto.settled(config)
    world_size = preflight.local_world_size(config)
    resumed = preflight.check(config, world_size)
    folder = RunFolder.of(config)
    with folder.prepare(config, resumed) as lock:
        _run_ranks(config, world_size, folder, lock)


def _run_ranks(config: Config, world_size: int, folder: RunFolder, lock: RunLock) -> None:
    device = preflight.device_type(config)
    with _blocked(STOP_SIGNALS):  # ranks inherit this: what comes before they listen waits for them
        # Rank 0 hosts the meeting, not this process: ranks whose launcher dies still have to checkpoint together.
        job = (world_size, _free_port(), str(folder.path), lock)
        logger.info("starting %d %s rank%s; run folder %s", world_size, device, "s" * (world_size > 1), folder.path)
        context = mp.start_processes(worker.spawned, args=job, nprocs=world_size, join=False, start_method="spawn")  # type: ignore[attr-defined, no-untyped-call]
        forward = _Forward(context.pids())
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)  # says at length which ranks it ends
    try:
        while not context.join(timeout=1.0, grace_period=_KILL_AFTER_S):
            pass
    except ProcessException as error:
        raise JobFailed(_reason(error, folder)) from None
    finally:
        forward.close()
        for process in context.processes:
            if process.is_alive():
                process.kill()
                process.join()  # it holds the lock


def _free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((worker.MEETING_HOST, 0))
        return int(listener.getsockname()[1])


def _reason(error: ProcessException, folder: RunFolder) -> str:
    """What brought the job down: the first note that a rank left, or what killed a rank."""
    note = folder.first_error()
    name = getattr(error, "signal_name", None)
    if name is None:
        # A note that could not be written: the traceback's last line is `module.Class: what`.
        kind, colon, what = str(error).rstrip().rpartition("\n")[2].partition(":")
        return note or f"rank {error.error_index} failed: {kind.rpartition('.')[2]}{colon}{what}"
    hint = "; out of memory? (see dmesg)" if name == "SIGKILL" else ""
    killed = f"rank {error.error_index} was killed by {name}{hint}"
    return killed if note is None else f"{killed}\n{note}"


@contextlib.contextmanager
def _blocked(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Let signals wait inside the context, in this process and in those it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    resource_tracker.ensure_running()  # started later, by the first rank, it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.difference(numbers))


class _Forward:
    """Hands this process's stop signals to the ranks. A second SIGINT raises KeyboardInterrupt instead."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._interrupts = 0
        self._previous = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            logger.info("interrupted: stopping after this step with a checkpoint; once more to stop at once")
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(pid, signal.SIGTERM if number == signal.SIGINT else number)

    def close(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _join(config: Config, place: Placement) -> None:
    """Be one rank; rank 0 checks the job and its configuration is everybody's."""
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
    try:
        worker.join_group(config, place.local_rank)
    except RuntimeError as error:
        meeting = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise JobFailed(f"rank {place.rank} cannot join the other ranks at {meeting}: {error}") from None
    answer: list[object] = [None]
    if place.rank == 0:
        try:
            config = auto.settled(config)
            resumed = preflight.check(config, place.world_size)
            atexit.register(RunFolder.of(config).prepare(config, resumed).release)
            answer = [config]
        except ValueError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ValueError):
        dist.destroy_process_group()
        if place.rank == 0:
            raise answer[0]
        _refused()
    assert isinstance(answer[0], Config)
    try:
        worker.run(answer[0])
    except Exception as error:
        note = RunFolder.of(answer[0]).error_of(place.rank)
        raise JobFailed(note or f"rank {place.rank} failed: {error}") from None


def _refused() -> NoReturn:
    """End a rank other than 0 whose job is refused, after rank 0, which says why: the first to end ends the others."""
    time.sleep(_LET_RANK_ZERO_SPEAK_S)
    sys.exit(2)
