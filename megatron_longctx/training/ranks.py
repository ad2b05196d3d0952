"""Run one function on several ranks: on new processes of this host, or on the ranks that torchrun has started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..config.gpus import max_gpu_ranks
from ..config.progress import Progress
from ..core.errors import JobFailed, refuse
from .local_ranks import RankFailed, run_ranks
from .rendezvous import RankInfo, join_group

_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Ranks:
    """The ranks that a function runs on: their number, and `cpu` or `cuda`."""

    count: int
    device: str

    @classmethod
    def of(cls, ranks: int | None, device: str, least: int = 2) -> Ranks:
        """Check the ranks against this machine. Under torchrun, the number of ranks is torchrun's.

        Args:
            ranks: None for one per GPU, or 2 on CPUs.
            device: `cpu`, `cuda`, or `auto` for CUDA if available.
            least: the fewest ranks that the function needs.

        Raises:
            ValueError: fewer ranks than `least`, or more than GPUs.
        """
        cuda = torch.cuda.is_available() and device != "cpu"
        if device == "cuda" and not cuda:
            raise refuse("device", device, "a CUDA device here; torch sees none", "Use CPUs.")
        gpus = max_gpu_ranks() if cuda else 0
        started = RankInfo.from_torchrun(os.environ)
        count = started.world_size if started else ranks or gpus or 2
        if count < least:
            raise refuse("ranks", count, f"{least} or more", "The measurement needs that many.")
        if cuda and started is None and count > gpus:
            raise refuse("ranks", count, f"at most {gpus}, the GPUs here", "Use fewer, or CPUs, or torchrun on hosts.")
        return cls(count, "cuda" if cuda else "cpu")

    @property
    def local_device(self) -> torch.device:
        """The device of the calling rank."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def run_on_ranks(ranks: Ranks, fn: Callable[..., Any], *args: Any) -> Any:
    """Run `fn(rank, *args)` on every rank and return rank 0's result. Torchrun's other ranks exit here.

    Raises:
        ValueError: a rank's refusal.
        JobFailed: a rank failed otherwise.
    """
    place = RankInfo.from_torchrun(os.environ)
    if place is not None:
        with Progress(f"measuring on {ranks.count} ranks", told=place.rank == 0):
            join_group(place, None, _TIMEOUT_S, cuda=ranks.device == "cuda")
            result = fn(place.rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        if place.rank:
            sys.exit(0)
        return result
    backend = "nccl" if ranks.device == "cuda" else "gloo"
    if ranks.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with Progress(f"measuring on {ranks.count} ranks"):
            return run_ranks(fn, ranks.count, *args, timeout=_TIMEOUT_S, backend=backend)[0]
    except RankFailed as error:
        _, refused, message = error.summary.partition(" failed: ValueError: ")
        raise (ValueError(message) if refused else JobFailed(error.summary)) from error
    except TimeoutError as error:
        raise JobFailed(str(error)) from error


def broadcast_json(value: Any = None) -> Any:
    """Broadcast rank 0's JSON value to all ranks, tuples as lists. Every rank waits for all others.

    JSON, because unpickling can execute code.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    text = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(text)], device=device)
    dist.all_reduce(size)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(size), dtype=torch.uint8)
    data = data.to(device)
    dist.broadcast(data, src=0)
    return json.loads(data.cpu().numpy().tobytes())
