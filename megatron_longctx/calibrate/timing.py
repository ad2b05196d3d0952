"""Seconds by the clock, in which counts what the host takes to issue work: of calls on one device, of steps that all
ranks take together."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import gather_objects
from ..comm.device import synchronize

_LOAD_S = 0.1
"""Of work in a row. A GPU's power limit bites after 50 to 80 ms: a burst from idle is faster than passes in a row."""
_MOST_CALLS = 1000
"""Calls of which more come to less than `_LOAD_S` are limited by the host, and no load."""
_ROW_S, _MOST_IN_ROW = 0.005, 100
"""Short calls are timed so many in a row that waiting for the device at the end of the row does not show."""


def row_seconds(work: Callable[[], object], device: torch.device, count: int) -> float:
    """Of one of `count` calls of `work` in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / count


def num_loading_calls(seconds: float) -> int:
    """How many calls of so many seconds in a row bring a GPU to the pace that it sustains."""
    return min(_MOST_CALLS, math.ceil(_LOAD_S / max(seconds, 1e-6)))


def put_under_load(work: Callable[[], object], device: torch.device) -> float:
    """Call `work`, which has no messages, twice, and on a GPU until it runs at the pace that it sustains; its last
    calls may be under way. Returns about what a call takes."""
    work()
    seconds = row_seconds(work, device, 1)
    for _ in range(num_loading_calls(seconds) - 1 if device.type == "cuda" else 0):
        work()
    return seconds


def sustained_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one call of `work`, which has no messages, on a device under load: the median of some rows."""
    about = put_under_load(work, device)
    count = max(1, min(_MOST_IN_ROW, int(_ROW_S / max(about, 1e-9))))
    return statistics.median(row_seconds(work, device, count) for _ in range(repeats))


def step_seconds(
    step: Callable[[], object], group: dist.ProcessGroup, device: torch.device, count: int, rounds: int = 1
) -> list[float]:
    """By round, seconds of one of `count` whole steps in a row, of the slowest rank: all ranks call this together."""

    def row(count: int) -> float:
        dist.barrier(group)
        return max(gather_objects(group, row_seconds(step, device, count)))

    row(2)  # builds plans and buffers, compiles kernels
    about = row(1)
    if device.type == "cuda":
        row(num_loading_calls(about))
    return [row(count) for _ in range(rounds)]


def training_step(call: Callable[..., Tensor], qkv: Sequence[Tensor], grad_out: Tensor) -> Callable[[], object]:
    """A layer's attention over q, k and v, and its gradients."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    return lambda: torch.autograd.grad(call(*leaves), leaves, grad_out)


def agreed(group: dist.ProcessGroup, measure: Callable[[], Sequence[float]]) -> list[float]:
    """The medians over ranks of numbers that all measure at once."""
    dist.barrier(group)
    return [statistics.median(values) for values in zip(*gather_objects(group, measure()), strict=True)]
