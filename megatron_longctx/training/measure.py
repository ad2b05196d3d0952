"""How calibration measures: on which ranks, how much, and how seconds are taken.

Times are wall-clock seconds, so they include what the host needs to issue the work. They are means of calls in a row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm import Transport, gather_objects
from ..core.comm.device import mean_seconds as mean_seconds
from ..core.kernels import AttentionKernel, KernelRequest, choose_kernel
from ..core.plans import Workload

_WARM_UP_S = 0.1
"""Seconds of calls in a row before measuring. A GPU's power limit takes effect after 50 to 80 ms: a burst from idle is
faster than passes in a row."""
_MAX_CALLS = 1000
"""The most warm-up calls. If more would take less than `_WARM_UP_S`, the host limits them, and they are no load."""
_ROW_S, _MAX_IN_ROW = 0.005, 100
"""Short calls are timed in rows of this length, so that waiting for the device at the end of a row does not count."""


def num_warm_up_calls(seconds: float) -> int:
    """Return how many calls in a row, of `seconds` each, bring a GPU to its sustained speed."""
    return min(_MAX_CALLS, math.ceil(_WARM_UP_S / max(seconds, 1e-6)))


def warm_up(work: Callable[[], object], device: torch.device) -> float:
    """Call `work`, which sends no messages, twice, and on a GPU until it runs at its sustained speed.

    Return the approximate seconds of a call. The last calls may still be running.
    """
    work()
    seconds = mean_seconds(work, device, 1)
    for _ in range(num_warm_up_calls(seconds) - 1 if device.type == "cuda" else 0):
        work()
    return seconds


def sustained_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the seconds of one call of `work`, which sends no messages, at sustained speed: the median of rows."""
    estimate = warm_up(work, device)
    count = max(1, min(_MAX_IN_ROW, int(_ROW_S / max(estimate, 1e-9))))
    return statistics.median(mean_seconds(work, device, count) for _ in range(repeats))


def step_seconds(
    step: Callable[[], object], group: dist.ProcessGroup, device: torch.device, count: int, rounds: int = 1
) -> list[float]:
    """Return, for every round, the mean seconds of `count` steps in a row on the slowest rank. All ranks call this."""

    def measure(count: int) -> float:
        dist.barrier(group)
        return max(gather_objects(group, mean_seconds(step, device, count)))

    measure(2)  # builds plans and buffers, compiles kernels
    estimate = measure(1)
    if device.type == "cuda":
        measure(num_warm_up_calls(estimate))
    return [measure(count) for _ in range(rounds)]


def training_step(call: Callable[..., Tensor], qkv: Sequence[Tensor], grad_out: Tensor) -> Callable[[], object]:
    """Return a function that computes attention over q, k and v, and its gradients."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    return lambda: torch.autograd.grad(call(*leaves), leaves, grad_out)


def median_over_ranks(group: dist.ProcessGroup, measure: Callable[[], Sequence[float]]) -> list[float]:
    """Return the medians, over ranks, of numbers that all ranks measure at the same time."""
    dist.barrier(group)
    return [statistics.median(values) for values in zip(*gather_objects(group, measure()), strict=True)]


@dataclass(frozen=True)
class Testbed:
    """The ranks, devices and workload to measure."""

    __test__ = False  # no test class for pytest

    group: dist.ProcessGroup
    device: torch.device  # of the calling rank
    workload: Workload
    kernel: str = "auto"  # a provider of attention, or `auto`
    transport: Transport | None = None  # None if no messages are measured

    @property
    def n(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def dtype(self) -> torch.dtype:
        return {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[self.workload.element_bytes]

    def choose_kernel(self, parts: int = 1, packed: bool = False) -> AttentionKernel:
        """Return the kernel for one of `parts` equal parts of the heads. Refuse one that cannot be used."""
        work = self.workload
        heads, kv_heads = max(1, work.num_heads // parts), max(1, work.num_kv_heads // parts)
        request = KernelRequest(
            self.device.type, self.dtype, work.head_dim, heads, kv_heads, v_head_dim=work.v_head_dim, packed=packed
        )
        return choose_kernel(self.kernel, request)

    def random(self, tokens: int, heads: int, size: int | None = None) -> Tensor:
        """Return a random tensor `[tokens, 1, heads, size]`; `size` is the workload's head dimension by default."""
        return torch.randn(tokens, 1, heads, size or self.workload.head_dim, device=self.device).to(self.dtype)

    def qkv(self, queries: int, keys: int, parts: int = 1) -> list[Tensor]:
        """Return random q, k, v and gradient of out for one of `parts` equal parts of the heads."""
        work = self.workload
        h, g = max(1, work.num_heads // parts), max(1, work.num_kv_heads // parts)
        sizes = ((queries, h, None), (keys, g, None), (keys, g, work.value_dim), (queries, h, work.value_dim))
        return [self.random(*size) for size in sizes]


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    # The longest kernel call with all heads. With heads in p parts, calls are up to p times as long, but no longer
    # than a sequence over all ranks.
    max_tokens: int
    min_tokens: int
    repeats: int
    length: int | None = None  # the job's sequence length, for which whole steps are measured, too

    @classmethod
    def of(cls, device: torch.device, max_tokens: int | None = None, length: int | None = None) -> Effort:
        cuda = device.type == "cuda"
        most = max_tokens or (32768 if cuda else 1024)
        return cls(most, min(most, 512 if cuda else 64), 5 if cuda else 3, length)

    def mode_lengths(self, device: torch.device, ranks: int) -> tuple[int, ...]:
        """Return the sequence lengths of whole steps: a short and a long one (one on CPUs), and `length` if larger."""
        per_rank = (4096, 16384) if device.type == "cuda" else (64,)
        lengths = {ranks * tokens for tokens in per_rank if tokens <= self.max_tokens} or {ranks * self.max_tokens}
        return tuple(sorted(lengths | ({self.length} if self.length and self.length >= min(lengths) else set())))
