"""The one way tests run several ranks: `run_distributed(fn, world_size, ...)` on gloo or NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..comm.local_ranks import run_ranks
from .jobs import PATIENCE_S
from .processes import start_context


def run_quickly(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` with ranks that start as `start_context` says."""
    return run_ranks(fn, world_size, *args, start_method=start_context().get_start_method(), **options)


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = PATIENCE_S, backend: str = "gloo"
) -> list[Any]:
    """`run_quickly` with one thread a rank: what every rank's `fn(rank, *args)` returned."""
    return run_quickly(fn, world_size, *args, timeout=timeout, backend=backend, threads=1)
