"""The one way tests run several ranks: `run_distributed(fn, world_size, ...)` on gloo or NCCL."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch

from ..comm.local_ranks import run_ranks


# What ranks import at their start, which otherwise is most of what they do.
_IMPORTED_ONCE = ["megatron_longctx.testing.training"]


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, backend: str = "gloo"
) -> list[Any]:
    """`run_ranks` with one thread a rank: what every rank's `fn(rank, *args)` returned.

    Where there is no CUDA, ranks are forks of a server that has imported torch and Megatron-Core, and done no more.
    """
    if torch.cuda.is_available():  # which does not survive a fork
        return run_ranks(fn, world_size, *args, timeout=timeout, backend=backend, threads=1)
    get_context("forkserver").set_forkserver_preload(_IMPORTED_ONCE)
    return run_ranks(fn, world_size, *args, timeout=timeout, backend=backend, threads=1, start_method="forkserver")
