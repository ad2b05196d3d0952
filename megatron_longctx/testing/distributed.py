"""The one way tests run several ranks: `run_distributed(fn, world_size, ...)` on gloo or NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any
from unittest import mock

import torch

from ..comm.local_ranks import run_ranks
from ..gpus import ranks_per_gpu

PATIENCE_S = 1800.0  # for what takes seconds on an idle machine: what is not there by then hangs
# What ranks import at their start, which otherwise is most of what they do.
_IMPORTED_ONCE = ["megatron_longctx.training.loop", "megatron_longctx.mcore.inference", "pytest", "hypothesis"]


def start_context() -> ForkServerContext | SpawnContext:
    """How tests start processes: forks of a server that has imported torch and Megatron-Core, and done no more.

    With CUDA, which does not survive a fork, every process imports for itself.
    """
    if torch.cuda.is_available():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


def run_quickly(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` with ranks that start as `start_context` says."""
    return run_ranks(fn, world_size, *args, start_method=start_context().get_start_method(), **options)


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = PATIENCE_S, backend: str = "gloo"
) -> list[Any]:
    """`run_quickly` with one thread a rank: what every rank's `fn(rank, *args)` returned.

    Ranks on gloo see no CUDA device, so that a test checks the same thing on every machine. Ranks that share GPUs have
    as many times as long.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    with mock.patch.dict(os.environ, hidden):
        return run_quickly(fn, world_size, *args, timeout=timeout * ranks_per_gpu(), backend=backend, threads=1)
