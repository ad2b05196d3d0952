"""Measuring whole passes of the modes that are fastest by simulation, by which their order is corrected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..attention import ContextParallelAttention
from ..schedules import Workload
from ..schedules.cost import Costs, ModeSample
from ..schedules.select import Candidate, Problem, all_modes, rank_modes
from ..topology import Cluster
from .timing import Stopwatch, layer_seconds, settle

_CLOSE = 1.3
"""Modes are measured that are simulated to take at most so many times what the fastest takes."""
_MOST = 8
_REPEATS = 6
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Modes:
    """What passes run on. choice: kernel and transport."""

    group: dist.ProcessGroup
    device: torch.device
    workload: Workload
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
        dtype = _DTYPES[work.element_bytes]

        def random(heads: int) -> torch.Tensor:
            return torch.randn(tokens, work.batch, heads, work.head_dim, device=self.device).to(dtype)

        q, k, v = (random(heads).requires_grad_() for heads in (work.num_heads, work.num_kv_heads, work.num_kv_heads))
        grad_out, watch = random(work.num_heads), Stopwatch(self.device)

        def step() -> tuple[Any, Any]:
            out = attention(q, k, v, length=length)
            middle = watch.mark()
            torch.autograd.grad(out, (q, k, v), grad_out)
            return middle, watch.mark()

        step()
        settle(step, watch, attention.warm_up_calls(length))
        return layer_seconds(step, watch, self.group, _REPEATS)
