"""Choosing a mode: simulate all that can run, take the fastest that fits into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..topology import Cluster
from .build import DEFAULT_OPTIONS, SCHEDULES, PlanOptions, build_plan, check_heads, num_messages
from .cost import GIB, Costs, Workload
from .hide import backward_plan
from .keep import keeping, keeps_received
from .publishing import published_bytes
from .simulate import Simulation, simulate

_MOST_MESSAGES = 400_000
"""Plans with more messages than this take too long to build to be candidates."""


@dataclass(frozen=True)
class Problem:
    """What a mode is chosen for. options: what holds for every mode. max_bytes: most memory of one attention call on
    any rank; None for no bound. over_peers: messages go through peer memory, which counts twice, as it is held.
    keep_received: auto, true or false (see `keeps_received`)."""

    n: int
    length: int
    workload: Workload
    causal: bool = True
    options: PlanOptions = DEFAULT_OPTIONS
    max_bytes: int | None = None
    over_peers: bool = False
    keep_received: str = "false"


@dataclass(frozen=True)
class Candidate:
    """A mode with its simulated passes, or the reason why it cannot run. corrections: what their seconds are to be
    multiplied by, forward and backward (`Costs.correction`)."""

    schedule: str
    options: PlanOptions = DEFAULT_OPTIONS
    forward: Simulation | None = None
    backward: Simulation | None = None
    reason: str = ""
    published_bytes: int = 0
    corrections: tuple[float, float] = (1.0, 1.0)

    @property
    def name(self) -> str:
        """The mode and what sets it apart from others of its name."""
        said = [f"inner_size={self.options.inner_size}"] * (self.options.inner_size is not None)
        said += [f"head_chunks={self.options.head_chunks}"] * (self.options.head_chunks > 1)
        said += [f"max_buffer_tokens={self.options.max_buffer_tokens}"] * (self.options.max_buffer_tokens is not None)
        return f"{self.schedule} ({', '.join(said)})" if said else self.schedule

    @property
    def predicted(self) -> tuple[float, float]:
        """Seconds, forward and backward."""
        if self.forward is None or self.backward is None:
            return math.inf, math.inf
        return self.forward.seconds * self.corrections[0], self.backward.seconds * self.corrections[1]

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return sum(self.predicted)

    @property
    def peak_bytes(self) -> int:
        most = max((each.peak_bytes for each in (self.forward, self.backward) if each), default=0)
        return most + self.published_bytes


def rank_modes(
    problem: Problem,
    cluster: Cluster,
    costs: Costs | None = None,
    *,
    candidates: Sequence[tuple[str, PlanOptions]] | None = None,
    timeline: bool = False,
) -> list[Candidate]:
    """Every mode that can run, the fastest first, then those that cannot, with their reasons.

    Args:
        cluster: of `problem.n` ranks.
        costs: None for what the cluster's device says.
        candidates: modes with their options; None for all there are, but for exchanges of heads in chunks within a
            node, unless they were measured (`Costs.modes`).

    Raises:
        ValueError: a cluster of another size, or without the figures that are needed.
    """
    costs = costs or Costs.of_device(cluster.device)
    found = []
    if candidates is None:
        measured = {sample.mode for sample in costs.modes}
        candidates = [
            (schedule, options)
            for schedule, options in all_modes(problem, cluster)
            # On one node chunks gain about as much as they cost, though they are priced as if they gained.
            if cluster.nodes > 1 or options.head_chunks == 1 or Candidate(schedule, options).name in measured
        ]
    for schedule, options in candidates:
        try:
            found.append(_price(schedule, options, problem, cluster, costs, timeline))
        except ValueError as error:
            found.append(Candidate(schedule, options, reason=str(error)))
    return sorted(found, key=lambda candidate: (bool(candidate.reason), candidate.seconds))


def select(problem: Problem, cluster: Cluster, costs: Costs | None = None) -> list[Candidate]:
    """As `rank_modes`, with one that can run in front.

    Raises:
        ValueError: no mode can, with every reason.
    """
    ranking = rank_modes(problem, cluster, costs)
    if not ranking or ranking[0].reason:
        reasons = "; ".join(f"{candidate.name}: {candidate.reason}" for candidate in ranking)
        raise ValueError(
            f"schedule=auto: no mode can run {problem.length} tokens on {problem.n} ranks ({reasons}). "
            "Raise the memory bound or the number of ranks."
        )
    return ranking


def table(ranking: Sequence[Candidate]) -> str:
    """A ranking as text."""
    lines = [f"  {'mode':<36} {'forward':>10} {'backward':>10} {'exposed':>10} {'idle':>6} {'memory':>10}"]
    for candidate in ranking:
        forward, backward = candidate.forward, candidate.backward
        if candidate.reason or forward is None or backward is None:
            lines.append(f"  {candidate.name:<36} not possible: {candidate.reason}")
            continue
        exposed = max(forward.exposed_s) + max(backward.exposed_s)
        total = (forward.seconds + backward.seconds) * forward.plan.n
        idle = 1 - (sum(forward.compute_s) + sum(backward.compute_s)) / total
        times = " ".join(f"{seconds * 1e3:>7.3f} ms" for seconds in candidate.predicted)
        lines.append(
            f"  {candidate.name:<36} {times} "
            f"{exposed * 1e3:>7.3f} ms {idle:>6.1%} {candidate.peak_bytes / GIB:>6.2f} GiB"
        )
    return "\n".join(lines)


def all_modes(problem: Problem, cluster: Cluster) -> Iterator[tuple[str, PlanOptions]]:
    """Modes with the options that may matter: group sizes, chunks, and buffer bounds where memory is bounded."""
    n, options = problem.n, problem.options
    for schedule in SCHEDULES:
        if schedule == "usp":
            yield from ((schedule, replace(options, inner_size=k)) for k in range(2, n) if n % k == 0)
        elif schedule == "ulysses":
            two = n > 1 and problem.workload.num_kv_heads % (2 * n) == 0
            yield from ((schedule, replace(options, head_chunks=k)) for k in ((1, 2) if two else (1,)))
        elif schedule == "double_ring":
            sizes = {cluster.ranks_per_node, options.inner(n)} - {n}
            yield from ((schedule, replace(options, inner_size=k)) for k in sorted(sizes) if n % k == 0)
        else:
            yield schedule, options
            if schedule == "all_gather" and n > 2:  # in a few groups, or in more where memory is bounded
                tokens = -(-problem.length // n)
                groups = sorted({n - 2, 4, 2, 1} if problem.max_bytes is not None else {n - 2}, reverse=True)
                yield from ((schedule, replace(options, max_buffer_tokens=k * tokens)) for k in groups)


def _price(
    schedule: str, options: PlanOptions, problem: Problem, cluster: Cluster, costs: Costs, timeline: bool
) -> Candidate:
    workload, n = problem.workload, problem.n
    check_heads(schedule, n, workload.num_heads, workload.num_kv_heads, options)
    if (messages := num_messages(schedule, n, problem.length, options)) > _MOST_MESSAGES:
        raise ValueError(f"its {messages} messages take too long to plan; fewer ranks or nodes would not")
    plan = build_plan(schedule, n, problem.length, problem.causal, options)
    if keeps_received(problem.keep_received, schedule, n, problem.length, workload.batch):
        plan = keeping(plan)
    forward = simulate(plan, cluster, workload, costs, timeline=timeline)
    backward = simulate(backward_plan(plan), cluster, workload, costs, timeline=timeline)
    plans = (forward.plan, backward.plan)
    published = 2 * max(published_bytes(each, workload) for each in plans) if problem.over_peers and n > 1 else 0
    most = max(forward.peak_bytes, backward.peak_bytes) + published
    if problem.max_bytes is not None and most > problem.max_bytes:
        raise ValueError(f"needs {most / GIB:.2f} GiB of {problem.max_bytes / GIB:.2f} GiB")
    found = Candidate(schedule, options, forward, backward, published_bytes=published)
    corrections = [costs.correction(found.name, problem.length, backward) for backward in (False, True)]
    return replace(found, corrections=(corrections[0], corrections[1]))
