"""Starts a training job: on this host by itself, or as one rank of what torchrun or Slurm has started."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from ..comm import broadcast_json, rendezvous
from ..comm.local_ranks import explain_failure, stopped_ranks
from ..comm.rendezvous import RankInfo
from ..compose import compose_config, config_of, load_config, override_config
from ..config import Config
from ..errors import JobFailed
from . import worker
from .heartbeat import Doing, last_operations, record_collectives, suspects
from .run_folder import RunFolder
from .run_lock import RunLock
from .signals import STOP_SIGNALS, handled

logger = logging.getLogger(__name__)

# After a failure, the other ranks get this long to end by themselves, and again after SIGTERM: a rank that hangs in a
# collective with a dead peer does not hear it.
_KILL_AFTER_S = 5.0
_LET_RANK_ZERO_SPEAK_S = 3.0


def train(overrides: Sequence[str], resolved: Path | None = None) -> None:
    """Compose the configuration once, refuse what cannot run, then train or resume.

    Args:
        resolved: a configuration that was composed before, in the place of the recipes.

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
        _refused()
    _hide_gpus(config)
    if place is None:
        _start_ranks(config)
    else:
        _join(config, place)


def composed(overrides: Sequence[str], resolved: Path | None) -> Config:
    """What the words say, on top of the recipes or of a configuration that was composed before.

    Raises:
        ValueError: see `compose_config` and `load_config`.
    """
    return compose_config(overrides) if resolved is None else override_config(load_config(resolved), overrides)


def preflight_only(overrides: Sequence[str], resolved: Path | None, world_size: int) -> RunFolder:
    """Refuse what `world_size` ranks would refuse, of which this host has its share; starts and writes nothing.

    Returns:
        the run's folder, which need not exist.

    Raises:
        ValueError: a job that cannot run, or whose run another job is training.
    """
    config = composed(overrides, resolved)
    _hide_gpus(config)
    from . import auto, preflight

    preflight.check(auto.settled(config), world_size)
    folder = RunFolder.of(config)
    if folder.lock.exists():
        RunLock(folder.lock).release()
    return folder


def _hide_gpus(config: Config) -> None:
    if config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron takes a GPU wherever it sees one


def _start_ranks(config: Config) -> None:
    from . import auto, preflight  # here: Megatron takes seconds to import, and wrong settings are refused before

    config, reason = auto.explained(config)
    world_size = preflight.local_world_size(config)
    resumed = preflight.check(config, world_size)
    folder = RunFolder.of(config)
    with folder.prepare(config, resumed, reason) as lock:
        _run_ranks(config, world_size, folder, lock, preflight.device_type(config))


def _run_ranks(config: Config, world_size: int, folder: RunFolder, lock: RunLock, device: str) -> None:
    with contextlib.ExitStack() as at_the_end:
        # Ranks inherit the blocking: a signal that comes before they listen waits for them.
        with _blocked(STOP_SIGNALS), rendezvous.listen() as listener:
            # Rank 0 hosts the meeting, not this process: ranks whose launcher dies still have to checkpoint together.
            job = (world_size, listener, str(folder.path), lock)
            logger.info("starting %d %s rank%s; run folder %s", world_size, device, "s" * (world_size > 1), folder.path)
            context = mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
                worker.spawned, args=job, nprocs=world_size, join=False, start_method="spawn"
            )
            at_the_end.callback(_kill, context.processes)
            at_the_end.callback(_Forward(context.pids()).close)
        logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)  # says at length which ranks it ends
        stopped: list[int] = []
        try:
            ended = False
            while not ended:
                wait(context.sentinels, timeout=1.0)
                stopped = stopped_ranks(context.pids())  # before `join` kills what is left
                ended = context.join(timeout=0.0, grace_period=_KILL_AFTER_S)
        except ProcessException as error:
            doing, limit = last_operations(folder), config.parallelism.timeout_s
            said = explain_failure(_reason(error, folder, doing), stopped, limit, doing, suspects(doing.values()))
            folder.status.fail(said)
            raise JobFailed(said) from None


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()  # it holds the lock


def _reason(error: ProcessException, folder: RunFolder, doing: Mapping[int, Doing]) -> str:
    """What brought the job down: the first note that a rank left, or what killed a rank."""
    note = folder.first_error()
    name = getattr(error, "signal_name", None)
    if name is None:
        # A note that could not be written: the traceback's last line is `module.Class: what`.
        kind, colon, what = str(error).rstrip().rpartition("\n")[2].partition(":")
        return note or f"rank {error.error_index} failed: {kind.rpartition('.')[2]}{colon}{what}"
    # NCCL's watchdog aborts a rank whose collective takes too long.
    hints = {"SIGKILL": "; out of memory? (see dmesg)", "SIGABRT": "; a collective's timeout? (see above)"}
    last = f", in {doing[error.error_index]}" if error.error_index in doing else ""
    killed = f"rank {error.error_index} was killed by {name}{last}{hints.get(name, '')}"
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
        self._previous = {number: signal.signal(number, self._forward) for number in handled()}

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


def _join(config: Config, place: RankInfo) -> None:
    """Be one rank; rank 0 checks the job and its configuration is everybody's."""
    place.export(os.environ)
    limit = config.parallelism.timeout_s
    record_collectives(RunFolder.of(config).ranks)
    try:
        rendezvous.join_group(place, rendezvous.rendezvous_store(place, limit), limit, worker.uses_cuda(config))
    except (RuntimeError, OSError) as error:
        meeting = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise JobFailed(f"rank {place.rank} cannot join the other ranks at {meeting}: {error}") from None
    refusal: ValueError | None = None
    if place.rank == 0:
        try:
            from . import auto, preflight

            config, reason = auto.explained(config)
            resumed = preflight.check(config, place.world_size)
            atexit.register(RunFolder.of(config).prepare(config, resumed, reason).release)
        except ValueError as error:
            refusal = error
    settled = broadcast_json(None if refusal else config.as_dict())
    if settled is None:
        dist.destroy_process_group()
        if refusal:
            raise refusal
        _refused()
    config = config_of(settled)
    try:
        worker.run(config)
    except Exception as error:
        said = RunFolder.of(config).error_of(place.rank) or f"rank {place.rank} failed: {error}"
        doing = last_operations(RunFolder.of(config))
        raise JobFailed(explain_failure(said, [], limit, doing, suspects(doing.values()))) from None


def _refused() -> NoReturn:
    """End a rank other than 0 whose job is refused, after rank 0, which says why: the first to end ends the others."""
    time.sleep(_LET_RANK_ZERO_SPEAK_S)
    sys.exit(2)
