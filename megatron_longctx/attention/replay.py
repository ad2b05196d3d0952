"""Passes over few tokens: replayed from CUDA graphs where launching their many short operations one by one takes longer
than running them (see `pace`)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .executor import BackwardPass, ForwardPass
from .pace import Pace

Tensors = tuple[Tensor, ...]
Pass = ForwardPass | BackwardPass


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


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    results: Tensors
    generation: int
    run: Pass  # holds the buffers that the graph writes to


class Replay:
    """One kind of pass: a program with inputs of the same shapes, always in the same process.

    Args:
        make: the pass over given inputs.
        results: what a pass that has run gives.
    """

    def __init__(self, make: Callable[[Tensors], Any], results: Callable[[Any], Tensors]) -> None:
        self._make, self._results = make, results
        self._pace = Pace()
        self._inputs: Tensors = ()
        self._captured: dict[int, _Captured] = {}  # by the half of the transport's memory in use

    def __call__(self, inputs: Tensors) -> Tensors:
        """The results for `inputs`, in memory of their own."""
        if self._pace.keeps:
            run = self._make(inputs)
            run.run(idle=torch.cuda.current_stream(inputs[0].device).query)
            self._pace.note(run.starved)
            return self._results(run)
        if not self._inputs:
            with torch.inference_mode(False):  # they outlive this call
                self._inputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
        torch._foreach_copy_(self._inputs, inputs)
        run = self._make(self._inputs)
        post = run.post()
        turn = post.begin()
        captured = self._captured.get(turn)
        if captured is None or captured.generation != post.generation:
            captured = self._captured[turn] = self._capture(run, post.generation)
        captured.graph.replay()
        return tuple(x.clone() for x in captured.results)

    def _capture(self, run: Any, generation: int) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            run.run(begun=True)
            results = self._results(run)
            run.post().join()
        return _Captured(graph, results, generation, run)
