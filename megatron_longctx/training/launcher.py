"""Starts a training job: on this host by itself, or as one rank of what torchrun or Slurm has started."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from ..compose import compose_config
from ..config import Config
from ..ports import free_port
from . import preflight, worker
from .run_folder import RunFolder
from .signals import STOP_SIGNALS

logger = logging.getLogger(__name__)

_KILL_AFTER_S = 10.0  # a rank that hangs in a collective with a dead peer does not hear SIGTERM


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
    config = compose_config(overrides)
    if config.train.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron takes a GPU wherever it sees one
    if place is None:
        _start_ranks(config)
    else:
        _join(config, place)


def _start_ranks(config: Config) -> None:
    world_size = preflight.local_world_size(config)
    resumed = preflight.check(config, world_size)
    folder = RunFolder.of(config)
    folder.prepare(config, resumed)
    device = preflight.device_type(config)
    logger.info("starting %d %s rank%s; run folder %s", world_size, device, "s" * (world_size > 1), folder.path)
    job = (world_size, free_port(), str(folder.path))
    context = mp.start_processes(worker.spawned, args=job, nprocs=world_size, join=False, start_method="spawn")  # type: ignore[attr-defined, no-untyped-call]
    previous = {number: signal.signal(number, _forward_to(context.pids())) for number in STOP_SIGNALS}
    try:
        while not context.join(timeout=1.0, grace_period=_KILL_AFTER_S):
            pass
    except ProcessException as error:
        raise JobFailed(folder.first_error() or f"rank {error.error_index} died: {error}") from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _forward_to(pids: Sequence[int]) -> Callable[[int, FrameType | None], None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGTERM if number == signal.SIGINT else number)
            except ProcessLookupError:  # it has ended already
                continue

    return forward


def _join(config: Config, place: Placement) -> None:
    """Be one rank; rank 0 checks the job and its configuration is everybody's."""
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
    worker.join_group(config, place.local_rank)
    answer: list[object] = [None]
    if place.rank == 0:
        try:
            resumed = preflight.check(config, place.world_size)
            RunFolder.of(config).prepare(config, resumed)
            answer = [config]
        except ValueError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ValueError):
        dist.destroy_process_group()
        raise answer[0]
    assert isinstance(answer[0], Config)
    worker.run(answer[0])
