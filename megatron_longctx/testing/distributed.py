"""The one way tests run several ranks: `run_distributed(fn, world_size, ...)` on gloo or NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..comm.local_ranks import run_ranks


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, backend: str = "gloo"
) -> list[Any]:
    """`run_ranks` with one thread a rank: what every rank's `fn(rank, *args)` returned."""
    return run_ranks(fn, world_size, *args, timeout=timeout, backend=backend, threads=1)
