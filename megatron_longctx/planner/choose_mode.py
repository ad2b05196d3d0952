"""The choice of a mode: simulate all that can run, and take the fastest that fits into memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..config.cluster import Cluster
from ..config.progress import Progress
from ..core.plans.backward import backward_plan, node_size_to_sum
from ..core.plans.build import build_plan
from ..core.plans.mask import Mask
from ..core.plans.modes import MODES, Mode, ModeOptions, SearchContext
from ..core.plans.workload import Target
from .cost import GIB, Costs
from .simulate import Simulation, simulate


@dataclass(frozen=True)
class Problem:
    """The problem that a mode is chosen for."""

    n: int
    mask: Mask
    target: Target
    unit: int = 1  # see `build_plan`
    layout: str = "auto"
    options: ModeOptions = field(default_factory=ModeOptions)  # the configured ones
    max_bytes: int | None = None  # the most memory of one attention call on any rank; None for no bound
    keep_received: bool | None = False  # see `keeps_received`
    sum_in_node: bool | None = False  # see `node_size_to_sum`


@dataclass(frozen=True)
class Candidate:
    """A mode with its simulated passes, or the reason why it cannot run."""

    name: str
    mode: Mode | None = None
    forward: Simulation | None = None
    backward: Simulation | None = None
    reason: str = ""
    corrections: tuple[float, float] = (1.0, 1.0)  # the factors of their seconds (`Costs.correction`)

    @property
    def predicted(self) -> tuple[float, float]:
        """The corrected seconds of forward and of backward."""
        if self.forward is None or self.backward is None:
            return math.inf, math.inf
        return self.forward.seconds * self.corrections[0], self.backward.seconds * self.corrections[1]

    @property
    def seconds(self) -> float:
        return sum(self.predicted)

    @property
    def peak_bytes(self) -> int:
        return max((each.peak_bytes for each in (self.forward, self.backward) if each), default=0)


def rank_modes(
    problem: Problem,
    cluster: Cluster,
    costs: Costs | None = None,
    *,
    candidates: Sequence[Mode] | None = None,
    timeline: bool = False,
) -> list[Candidate]:
    """Return every mode that can run, the fastest first, then those that cannot, with their reasons.

    Args:
        cluster: the cluster of the `problem.n` ranks.
        costs: None for those that the cluster's device describes. Refuse a device without figures.
        candidates: None for all options of every mode.
        timeline: record what every rank does when.
    """
    costs = costs or Costs.of_cluster(cluster)
    found: list[Candidate] = []
    if candidates is None:
        context = SearchContext(problem.n, problem.mask.length, cluster, problem.options, problem.max_bytes is not None)
        candidates = []
        for name, mode in MODES.items():
            try:
                candidates += mode.candidates(context)
            except ValueError as error:
                found.append(Candidate(name, reason=str(error)))
    with Progress("comparing modes", len(candidates), "modes") as progress:
        for candidate in progress.each(candidates):
            try:
                found.append(_simulate(candidate, problem, cluster, costs, timeline))
            except ValueError as error:
                found.append(Candidate(str(candidate), candidate, reason=str(error)))
    return sorted(found, key=lambda each: (bool(each.reason), each.seconds))


def choose_mode(
    problem: Problem, cluster: Cluster, costs: Costs | None = None, candidates: Sequence[Mode] | None = None
) -> list[Candidate]:
    """Return the result of `rank_modes`, whose first mode can run. Raises ValueError: none can, with every reason."""
    ranking = rank_modes(problem, cluster, costs, candidates=candidates)
    if not ranking or ranking[0].reason:
        reasons = "; ".join(f"{candidate.name}: {candidate.reason}" for candidate in ranking)
        raise ValueError(
            f"schedule=auto: no mode can run {problem.mask.length} tokens on {problem.n} ranks ({reasons}). "
            "Raise the memory bound or the number of ranks."
        )
    return ranking


def table(ranking: Sequence[Candidate]) -> str:
    """Format a ranking as a table."""
    lines = [f"  {'mode':<36} {'forward':>10} {'backward':>10} {'exposed':>10} {'idle':>6} {'memory':>10}"]
    for candidate in ranking:
        forward, backward = candidate.forward, candidate.backward
        if forward is None or backward is None:
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


def _simulate(mode: Mode, problem: Problem, cluster: Cluster, costs: Costs, timeline: bool) -> Candidate:
    target, n, length = problem.target, problem.n, problem.mask.length
    mode.check_heads(n, target.workload.num_heads, target.workload.num_kv_heads)
    plan = build_plan(
        mode,
        n,
        problem.mask,
        unit=problem.unit,
        layout=problem.layout,
        keep_received=problem.keep_received,
        batch=target.workload.batch,
        sum_in_node=node_size_to_sum(problem.sum_in_node, problem.options.cluster, n),
    )
    forward = simulate(plan, cluster, target, costs, timeline=timeline)
    backward = simulate(backward_plan(plan), cluster, target, costs, timeline=timeline)
    name = str(mode)
    corrections = costs.correction(name, length, False), costs.correction(name, length, True)
    found = Candidate(name, mode, forward, backward, corrections=corrections)
    if problem.max_bytes is not None and found.peak_bytes > problem.max_bytes:
        raise ValueError(f"needs {found.peak_bytes / GIB:.2f} GiB of {problem.max_bytes / GIB:.2f} GiB")
    return found
