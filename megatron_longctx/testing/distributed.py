"""`run_distributed(fn, world_size, ...)`, the only way in which tests run several ranks, on gloo or NCCL."""

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any
from unittest import mock

import torch

from ..config.gpus import ranks_per_gpu
from ..training.ranks import run_ranks

PATIENCE_S = 1800.0  # for work of seconds on an idle machine: what takes longer hangs
# Ranks import these at their start, which otherwise takes most of their time.
_PRELOADED = ["megatron_longctx.training.loop", "megatron_longctx.mcore.inference", "pytest", "hypothesis"]


def start_context() -> ForkServerContext | SpawnContext:
    """Return how tests start processes: as forks of a server that only imported torch and Megatron-Core.

    With CUDA, which does not survive a fork, every process imports for itself.
    """
    if torch.cuda.is_available():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def run_quickly(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Call `run_ranks` with ranks that start as `start_context` says."""
    return run_ranks(fn, world_size, *args, **options | {"start_method": start_context().get_start_method()})


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = PATIENCE_S, backend: str = "gloo"
) -> list[Any]:
    """Run `fn(rank, *args)` on every rank, with one thread each, and return the results indexed by rank.

    Ranks on gloo see no CUDA device, so a test checks the same on every machine. The timeout is multiplied by the
    number of ranks that share a GPU.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    with mock.patch.dict(os.environ, hidden):
        return run_quickly(fn, world_size, *args, timeout=timeout * ranks_per_gpu(), backend=backend, threads=1)
