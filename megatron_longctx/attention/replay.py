"""Passes over few tokens, replayed from CUDA graphs where that is faster than launching their many short operations one
by one (see `pace`)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import GraphWaits, WaitClock, from_all
from .executor import BackwardPass, ForwardPass
from .pace import Pace, timed_mark

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
    waits: GraphWaits | None = None  # None if they were not measured when it was captured


class Replay:
    """One kind of pass: a program with inputs of the same shapes, always in the same process.

    Args:
        make: the pass over given inputs.
        results: what a pass that has run gives.
        device: where it runs.
        group: of the ranks that run it together.
        clock: measures what passes wait for messages, within graphs too.
    """

    def __init__(
        self,
        make: Callable[[Tensors], Any],
        results: Callable[[Any], Tensors],
        device: torch.device,
        group: dist.ProcessGroup | None,
        clock: WaitClock | None = None,
    ) -> None:
        self._make, self._results = make, results
        self._pace = Pace(partial(timed_mark, device), partial(from_all, group))
        self._clock = clock or WaitClock(device)
        self._inputs: Tensors = ()
        self._captured: dict[int, _Captured] = {}  # by the half of the transport's memory in use

    def __call__(self, inputs: Tensors) -> Tensors:
        """The results for `inputs`, in memory of their own."""
        found = self._pace.run(partial(self._replay, inputs), partial(self._eager, inputs))
        if self._pace.replays is False and self._inputs:
            # CUDA frees a graph that still runs once it has ended; its memory goes to nothing that would come before.
            self._captured, self._inputs = {}, ()
        return found

    def _eager(self, inputs: Tensors) -> Tensors:
        run = self._make(inputs)
        run.run()
        return self._results(run)

    def _replay(self, inputs: Tensors) -> Tensors:
        if not self._inputs:
            return self._prepare(inputs)
        torch._foreach_copy_(self._inputs, inputs)
        run = self._make(self._inputs)
        post = run.post()
        turn = post.begin()
        captured = self._captured.get(turn)
        if captured is None or captured.generation != post.generation or self._leaves_out(captured):
            captured = self._captured[turn] = self._capture(run, post.generation)
        captured.graph.replay()
        if captured.waits is not None:
            self._clock.replayed(captured.waits)
        return tuple(x.clone() for x in captured.results)

    def _leaves_out(self, captured: _Captured) -> bool:
        """Whether it does not measure its waits, though somebody wants to know by now."""
        return self._clock.running and captured.waits is None

    def _prepare(self, inputs: Tensors) -> Tensors:
        """A pass as it is over the inputs that graphs will read, which may lie otherwise than those given: what copies
        them is planned here, since it cannot be while a stream is captured (`kernels.moves`)."""
        with torch.inference_mode(False):  # they outlive this call
            self._inputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
        torch._foreach_copy_(self._inputs, inputs)
        # Results may be inputs, which the next pass overwrites.
        return tuple(x.clone() for x in self._eager(self._inputs))

    def _capture(self, run: Any, generation: int) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph), self._clock.in_graph() as waits:
            run.run(begun=True)
            results = self._results(run)
            run.post().join()
        return _Captured(graph, results, generation, run, waits)
