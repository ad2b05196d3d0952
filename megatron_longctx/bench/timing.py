"""Seconds on a device: events on CUDA, the clock on CPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist


class Stopwatch:
    """Marks in the device's own order of work, and the seconds between them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device

    def mark(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event | float, stop: torch.cuda.Event | float) -> float:
        """Between two marks; call `finish` before."""
        if isinstance(start, float) or isinstance(stop, float):
            assert isinstance(start, float) and isinstance(stop, float)
            return stop - start
        return float(start.elapsed_time(stop)) / 1e3

    def finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


_LOAD_S = 0.1
"""Of work in a row. A GPU's power limit bites after 50 to 80 ms: a burst from idle is faster than passes in a row."""
_MOST_CALLS = 1000
"""Calls of which more come to less than `_LOAD_S` are limited by the host, and no load."""


def num_loading_calls(seconds: float) -> int:
    """How many calls of so many seconds in a row bring a GPU to the pace that it sustains."""
    return min(_MOST_CALLS, math.ceil(_LOAD_S / max(seconds, 1e-6)))


def put_under_load(work: Callable[[], object], device: torch.device) -> None:
    """Call `work` twice, and on a GPU on until it runs at the pace that it sustains; the last calls may be under way.

    For work without messages: ranks make different numbers of calls.
    """
    watch = Stopwatch(device)
    work()
    watch.finish()
    start = watch.mark()
    work()
    stop = watch.mark()
    watch.finish()
    if device.type == "cuda":
        for _ in range(num_loading_calls(watch.seconds(start, stop)) - 1):
            work()


def sustained_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median over `repeats` of one call of `work`, which has no messages, on a device under load."""
    put_under_load(work, device)
    return _median_seconds(work, Stopwatch(device), repeats)


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 2) -> float:
    """Median over `repeats` of one call of `work`, its first calls left out."""
    watch = Stopwatch(device)
    for _ in range(warm_up):
        work()
    watch.finish()
    return _median_seconds(work, watch, repeats)


def _median_seconds(work: Callable[[], object], watch: Stopwatch, repeats: int) -> float:
    marks = [watch.mark()]
    for _ in range(repeats):
        work()
        marks.append(watch.mark())
    watch.finish()
    return statistics.median(watch.seconds(a, b) for a, b in pairwise(marks))


Step = Callable[[], tuple[Any, Any]]
"""A layer's forward and backward; the marks after each."""


def layer_step(
    call: Callable[..., torch.Tensor], qkv: Sequence[torch.Tensor], grad_out: torch.Tensor, watch: Stopwatch
) -> Step:
    """A layer's attention over q, k and v, and its gradients."""
    leaves = [x.detach().requires_grad_() for x in qkv]

    def step() -> tuple[Any, Any]:
        out = call(*leaves)
        middle = watch.mark()
        torch.autograd.grad(out, leaves, grad_out)
        return middle, watch.mark()

    return step


def settle(step: Step, watch: Stopwatch, warm_up: int) -> None:
    """Steps that are not measured. Two more once those are done: what they told decides how the others go."""
    for calls in (warm_up, 2):
        for _ in range(calls):
            step()
        watch.finish()


def layer_seconds(step: Step, watch: Stopwatch, group: dist.ProcessGroup, repeats: int) -> tuple[float, float]:
    """Forward and backward: medians over `repeats` steps in a row, of the rank whose two together take longest."""
    dist.barrier(group)
    first = watch.mark()
    marks = [(first, first)] + [step() for _ in range(repeats)]
    watch.finish()
    rounds = [(a[1], *b) for a, b in pairwise(marks)]
    both = statistics.median(watch.seconds(start, stop) for start, _, stop in rounds)
    forward = statistics.median(watch.seconds(start, middle) for start, middle, _ in rounds)
    times: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(times, (both, forward), group=group)
    slowest, forward = max(times)
    return forward, slowest - forward


def powers_of_two(first: int, last: int) -> Sequence[int]:
    """first, 2 first, 4 first, ... up to last."""
    sizes = [first]
    while sizes[-1] * 2 <= last:
        sizes.append(sizes[-1] * 2)
    return sizes
