"""Ranks that run one function: on this host, or as torchrun has started them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException

from ..comm.local_ranks import run_ranks
from ..comm.rendezvous import RankInfo, join_group
from ..errors import JobFailed, refuse
from ..gpus import gpu_ranks

_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Where:
    """ranks: how many. device: cpu or cuda."""

    ranks: int
    device: str

    @classmethod
    def of(cls, ranks: int | None, device: str, least: int = 2) -> Where:
        """Checked against this machine; `ranks=None` for one per GPU, `auto` for CUDA where there is any. Under
        torchrun there are as many ranks as it has started.

        Raises:
            ValueError: fewer ranks than `least`, or more than there are GPUs.
        """
        cuda = torch.cuda.is_available() and device != "cpu"
        if device == "cuda" and not cuda:
            raise refuse("device", device, "a CUDA device here; torch sees none", "Use CPUs.")
        gpus = gpu_ranks() if cuda else 0
        started = RankInfo.from_torchrun(os.environ)
        count = started.world_size if started else ranks or gpus or 2
        if count < least:
            raise refuse("ranks", count, f"{least} or more", "What is measured needs so many.")
        if cuda and started is None and count > gpus:
            raise refuse("ranks", count, f"at most {gpus}, the GPUs here", "Use fewer, or CPUs, or torchrun on hosts.")
        return cls(count, "cuda" if cuda else "cpu")

    @property
    def here(self) -> torch.device:
        """A rank's own device."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


def world() -> dist.ProcessGroup:
    """All ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def start(where: Where, fn: Callable[..., Any], *args: Any) -> Any:
    """Run `fn(rank, *args)` on every rank; returns what rank 0 gives. The other ranks of torchrun end here.

    Raises:
        ValueError: what a rank refused.
        JobFailed: a rank failed otherwise.
    """
    place = RankInfo.from_torchrun(os.environ)
    if place is not None:
        return _joined(place, where, fn, *args)
    backend = "nccl" if where.device == "cuda" else "gloo"
    if where.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        return run_ranks(fn, where.ranks, *args, timeout=_TIMEOUT_S, backend=backend)[0]
    except ProcessRaisedException as error:
        said = str(error).strip().splitlines()[-1]
        if said.startswith("ValueError: "):
            raise ValueError(said.removeprefix("ValueError: ")) from error
        raise JobFailed(f"rank {error.error_index} failed: {said}") from error
    except (ProcessException, TimeoutError) as error:  # killed; or hanging
        raise JobFailed(str(error)) from error


def _joined(place: RankInfo, where: Where, fn: Callable[..., Any], *args: Any) -> Any:
    join_group(place, None, _TIMEOUT_S, cuda=where.device == "cuda")
    result = fn(place.rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    if place.rank:
        sys.exit(0)
    return result
