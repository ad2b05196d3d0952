"""Measuring whole passes of the modes that are fastest by simulation, by which their order is corrected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..attention import ContextParallelAttention
from ..schedules import Workload
from ..schedules.cost import Costs, ModeSample
from ..schedules.select import Candidate, Problem, all_modes, rank_modes
from ..topology import Cluster
from .timing import Stopwatch, layer_seconds, layer_step, settle

_CLOSE = 1.3
"""Modes are measured that are simulated to take at most so many times what the fastest takes."""
_MOST = 8
_REPEATS = 6


@dataclass(frozen=True)
class Modes:
    """What passes run on. dtype: of q, k and v. choice: kernel and transport."""

    group: dist.ProcessGroup
    device: torch.device
    workload: Workload
    dtype: torch.dtype
    choice: tuple[str, str]

    def samples(self, cluster: Cluster, costs: Costs, tokens: tuple[int, ...]) -> tuple[ModeSample, ...]:
        """Of sequences of so many tokens a rank. All ranks call this at once, and get the same answer.

        Args:
            costs: what the passes are simulated with.
        """
        n, found = dist.get_world_size(self.group), []
        for each in tokens:
            problem = Problem(n, n * each, self.workload, keep_received="auto")
            every = rank_modes(problem, cluster, costs, candidates=list(all_modes(problem, cluster)))
            ranking = [candidate for candidate in every if not candidate.reason]
            close = [
                candidate.name for candidate in ranking[:_MOST] if candidate.seconds <= _CLOSE * ranking[0].seconds
            ]
            names: list[Any] = [None] * n
            dist.all_gather_object(names, close, group=self.group)
            by_name = {candidate.name: candidate for candidate in ranking}
            for candidate in map(by_name.__getitem__, names[0]):  # the same on all ranks, whatever each has found
                took = self._seconds(candidate, problem.length)
                found += [
                    ModeSample(candidate.name, problem.length, bool(way), seconds / simulated)
                    for way, (seconds, simulated) in enumerate(zip(took, candidate.predicted, strict=True))
                ]
        return tuple(found)

    def _seconds(self, candidate: Candidate, length: int) -> tuple[float, float]:
        """Forward and backward of one layer, of the rank whose two take longest: as `bench attention` measures."""
        kernel, transport = self.choice
        attention = ContextParallelAttention(
            self.group, schedule=candidate.schedule, options=candidate.options, kernel=kernel, transport=transport
        )
        tokens, work = attention.layout(length).num_tokens(attention.rank), self.workload
        q, k, v, grad_out = (
            torch.randn(tokens, work.batch, heads, work.head_dim, device=self.device).to(self.dtype)
            for heads in (work.num_heads, work.num_kv_heads, work.num_kv_heads, work.num_heads)
        )
        watch = Stopwatch(self.device)
        step = layer_step(partial(attention, length=length), (q, k, v), grad_out, watch)
        step()
        settle(step, watch, attention.warm_up_calls(length))
        return layer_seconds(step, watch, self.group, _REPEATS)
