"""Measuring whole passes of the modes that are fastest by simulation, by which their order is corrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..attention import ContextParallelAttention
from ..schedules import Workload
from ..schedules.cost import Costs, ModeSample
from ..schedules.select import Candidate, Problem, all_modes, rank_modes
from ..topology import Cluster
from .timing import Stopwatch, layer_seconds, layer_step, num_loading_calls, settle

_CLOSE = 1.3
"""Modes are measured that are simulated to take at most so many times what the fastest takes."""
_MOST = 8
_LONGEST_S = 1.0
"""Lengths are left out where the forward and backward of the fastest mode are simulated to take longer."""
_LONG_S = 0.2
_BUDGET_S = 20.0
"""Of a length: modes that it does not last for are left out."""


class Steps(NamedTuple):
    """Of one mode and length: forward and backward so many times. untimed: None for what settles the attention."""

    untimed: int | None
    timed: int

    @classmethod
    def of(cls, seconds: float) -> Steps:
        """For steps of about so many seconds."""
        return cls(2, 3) if seconds > _LONG_S else cls(None, 6)

    def total_seconds(self, seconds: float) -> float:
        """Of all steps of so many seconds: one builds plans and buffers, and about four settle."""
        return seconds * (self.timed + (5 if self.untimed is None else self.untimed))


def worth_measuring(ranking: Sequence[Candidate]) -> list[Candidate]:
    """Of modes, the fastest by simulation first, those that are close to it, as many as the time suffices for."""
    if not ranking or ranking[0].seconds > _LONGEST_S:
        return []
    close = [candidate for candidate in ranking[:_MOST] if candidate.seconds <= _CLOSE * ranking[0].seconds]
    found, left = [], _BUDGET_S
    for candidate in close:
        left -= Steps.of(candidate.seconds).total_seconds(candidate.seconds)
        if left < 0:
            break
        found.append(candidate)
    return found


@dataclass(frozen=True)
class Modes:
    """What passes run on. dtype: of q, k and v. choice: kernel and transport."""

    group: dist.ProcessGroup
    device: torch.device
    workload: Workload
    dtype: torch.dtype
    choice: tuple[str, str]

    def samples(self, cluster: Cluster, costs: Costs, lengths: Sequence[int]) -> tuple[ModeSample, ...]:
        """Of sequences of so many tokens, but those that take too long. All ranks call this at once, and get the same
        answer.

        Args:
            costs: what the passes are simulated with.
        """
        n, found = dist.get_world_size(self.group), []
        for length in lengths:
            problem = Problem(n, length, self.workload, keep_received="auto")
            every = rank_modes(problem, cluster, costs, candidates=list(all_modes(problem, cluster)))
            ranking = [candidate for candidate in every if not candidate.reason]
            chosen: list[Any] = [None] * n
            mine = [(candidate.name, candidate.seconds) for candidate in worth_measuring(ranking)]
            dist.all_gather_object(chosen, mine, group=self.group)
            by_name = {candidate.name: candidate for candidate in ranking}
            for name, seconds in chosen[0]:  # the same on all ranks, whatever each has found
                candidate = by_name[name]
                took = self._seconds(candidate, length, seconds)
                found += [
                    ModeSample(name, length, bool(way), measured / simulated)
                    for way, (measured, simulated) in enumerate(zip(took, candidate.predicted, strict=True))
                ]
        return tuple(found)

    def _seconds(self, candidate: Candidate, length: int, about: float) -> tuple[float, float]:
        """Forward and backward of one layer, of the rank whose two take longest: as `bench attention` measures, but
        under load.

        Args:
            about: seconds that both are thought to take, the same on all ranks.
        """
        kernel, transport = self.choice
        attention = ContextParallelAttention(
            self.group, schedule=candidate.schedule, options=candidate.options, kernel=kernel, transport=transport
        )
        tokens, work = attention.layout(length).num_tokens(attention.rank), self.workload
        q, k, v, grad_out = (
            torch.randn(tokens, work.batch, heads, work.head_dim, device=self.device).to(self.dtype)
            for heads in (work.num_heads, work.num_kv_heads, work.num_kv_heads, work.num_heads)
        )
        watch, steps = Stopwatch(self.device), Steps.of(about)
        step = layer_step(partial(attention, length=length), (q, k, v), grad_out, watch)
        step()
        if steps.untimed is None:
            settle(step, watch, attention.warm_up_calls(length))
            for _ in range(num_loading_calls(about) if self.device.type == "cuda" else 0):
                step()
        else:
            for _ in range(steps.untimed - 1):
                step()
        return layer_seconds(step, watch, self.group, steps.timed)
