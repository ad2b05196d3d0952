"""Capturing CUDA graphs beside other threads and memory that peers read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what is issued inside.

    Other threads may go on with CUDA meanwhile: NCCL's watchdog does. Garbage is collected before and not meanwhile,
    since memory that peers read cannot be given back while a stream is captured.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if enabled:
            gc.enable()
