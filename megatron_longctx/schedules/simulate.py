"""The time that a plan takes on a described cluster: its programs, priced operation by operation, without running them.

Every rank has two lanes. The compute lane issues the program's operations: kernel calls, copies, merges, and waiting.
The transfer lane starts each step's messages after its previous ones and after the mark that the program says. A
message starts when both of its ranks are ready; messages of one step that share a link, a port or a NIC share its rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import refuse
from ..topology import Cluster, Resource
from .collector import collector_paused
from .cost import GIB, Costs, Workload
from .footprint import footprint, row_bytes
from .lower import Lowering
from .messages import Messages
from .plan import Heads, Kind, Plan
from .program import Acquire, Compute, Copy, Mark, Merge, Op, Program, Release, Send, Wait
from .repeats import LEAST_RANKS, Repeats, Short
from .target import Target


class Span(NamedTuple):
    """Something a rank's lane does, from `start` to `stop` in seconds. `home`: whose keys a call attends, else -1."""

    rank: int
    lane: str  # compute | transfer
    start: float
    stop: float
    label: str
    step: int
    home: int = -1


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found; seconds and bytes.

    compute_s: kernel calls, merging and packing, per rank. exposed_s: waiting for messages between them. idle_s: the
    rest until the last rank is done. links: share of the time that each resource is busy. peak_bytes: the most any
    rank holds for this call, its own tensors and its send memory included, kernels' workspace apart. operations: kernel
    calls, merges and steps with messages that a host issues, of the rank with the most. spans: the time line, where it
    was asked for.
    """

    plan: Plan
    seconds: float
    compute_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    links: dict[Resource, float] = field(repr=False)
    peak_bytes: int
    operations: int
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time in which they compute nothing."""
        total = self.seconds * self.plan.n
        return 1 - sum(self.compute_s) / total if total else 0.0

    @property
    def busiest_link(self) -> tuple[Resource, float] | None:
        return max(self.links.items(), key=lambda item: item[1]) if self.links else None


def simulate(
    plan: Plan,
    cluster: Cluster,
    target: Target | Workload,
    costs: Costs | None = None,
    *,
    timeline: bool = False,
) -> Simulation:
    """Price a forward or backward plan.

    Args:
        cluster: of as many ranks as the plan's, or more; rank r of the plan is its rank r.
        target: what it is lowered for; a workload for messages point to point and the plainest of kernels.
        costs: None for what `cluster.device` says.
        timeline: also record what every rank does when.

    Raises:
        ValueError: a cluster with fewer ranks, or without the figures that are needed.
    """
    if cluster.n < plan.n:
        raise refuse("cluster", f"{cluster.name} of {cluster.n} ranks", f"{plan.n} or more", "Use cluster.resized().")
    target = target if isinstance(target, Target) else Target(target)
    with collector_paused():
        return _Simulated(plan, cluster, target, costs or Costs.of_device(cluster.device), timeline).result()


class _Item(NamedTuple):
    """What a rank does next: work of so many seconds, or, where `op` is given, waiting for messages (Wait), noting that
    all before is done (Mark), or being ready for messages: now (Acquire), or as of `marks` marks ago (Send)."""

    op: type[Op] | None
    seconds: float = 0.0
    label: str = ""
    home: int = -1
    marks: int = 0


class _Steps(NamedTuple):
    """What a rank does until it starts each step's messages, and behind the last of them; how many operations a host
    issues of these; peak_bytes of all; totals: what accumulators are of, by kind, tokens and heads."""

    items: list[list[_Item]]
    operations: list[int]
    peak_bytes: int
    totals: frozenset[tuple[Kind, int, Heads]]


class _Simulated:
    def __init__(self, plan: Plan, cluster: Cluster, target: Target, costs: Costs, timeline: bool) -> None:
        self.plan, self.cluster, self.workload, self.costs = plan, cluster, target.workload, costs
        n = plan.n
        self.compute = [0.0] * n  # when each rank's compute lane is free
        self.transfer = [0.0] * n
        self.busy = [0.0] * n
        self.exposed = [0.0] * n
        self.blocked = [0.0] * n  # until when a message of this step holds processors of a rank
        self.spans: list[Span] | None = [] if timeline else None
        self._calls: dict[object, float] = {}
        self.operations = self.peak_bytes = 0
        lowering, found = Lowering(plan, target), dict[object, _Steps]()
        # A time line says whose keys a call attends, and peers read each other's memory.
        whole = timeline or target.hosts is not None or bool(plan.kept) or n < LEAST_RANKS
        repeats = None if whole else Repeats(plan, target.workload)
        self._items: list[list[list[_Item]]] = []
        for rank in range(n):
            short = Short((rank,), plan) if repeats is None else repeats.short(rank)
            of_short = found.get(short.key)
            if of_short is None:
                program = (lowering if short.plan is plan else Lowering(short.plan, target)).program(rank)
                of_short = found[short.key] = self._priced(program)
            if short.joined & of_short.totals or not all(cut.repeats(of_short.items) for cut in short.cuts):
                of_short, short = self._priced(lowering.program(rank)), Short((rank,), plan)
            self._items.append(short.all_of(of_short.items))
            self.operations = max(self.operations, sum(short.all_of(of_short.operations)))
            self.peak_bytes = max(self.peak_bytes, of_short.peak_bytes)
        self._marks: list[list[float]] = [[] for _ in range(n)]

    def result(self) -> Simulation:
        n = self.plan.n
        arrived: list[float] = [0.0] * n
        messages = Messages(n, self.cluster, self.workload, self.costs)
        for t, step in enumerate(self.plan.steps):
            ready = [self._until_messages(rank, t, arrived[rank]) for rank in range(n)]
            starts, done = messages.exchange(step.moves, ready, self.transfer)
            if self.spans is not None:
                for rank, (start, stop) in enumerate(zip(starts, done, strict=True)):
                    if start >= 0:
                        self.spans.append(Span(rank, "transfer", start, stop, f"step {t}", t))
            self.blocked = [late if late > early else 0.0 for early, late in zip(self.transfer, done, strict=True)]
            self.transfer = arrived = done
        for rank in range(n):
            self._until_messages(rank, len(self.plan.steps), arrived[rank])
        end = max(self.compute, default=0.0)
        idle = tuple(end - busy - exposed for busy, exposed in zip(self.busy, self.exposed, strict=True))
        return Simulation(
            plan=self.plan,
            seconds=end,
            compute_s=tuple(self.busy),
            exposed_s=tuple(self.exposed),
            idle_s=idle,
            links={resource: used / end for resource, used in messages.used.items()} if end else {},
            peak_bytes=self.peak_bytes,
            operations=self.operations,
            spans=tuple(self.spans or ()),
        )

    def _priced(self, program: Program) -> _Steps:
        """A rank's operations with their times; only sums of them where no time line is wanted."""
        sum_up = self.spans is None and not self.costs.blocking
        steps: list[list[_Item]] = [[] for _ in range(program.num_steps + 1)]
        operations = [0] * len(steps)
        t, seconds, marks, after = 0, 0.0, dict[int, int](), -1
        for op in program.ops:
            item = self._item(op, program)
            if item is None:
                continue
            operations[t] += not isinstance(op, Copy | Wait | Mark)
            if sum_up and item.op is None:
                seconds += item.seconds
                continue
            if seconds:
                steps[t].append(_Item(None, seconds))
                seconds = 0.0
            if isinstance(op, Wait):
                t = max(t, op.step + 1)
            elif isinstance(op, Mark):
                marks[op.number] = len(marks)
            elif isinstance(op, Send | Acquire):
                t = max(t, op.step)
            if isinstance(op, Send) and op.after > after:
                item = item._replace(marks=len(marks) - marks[op.after])
                if program.sends.messages[op.step] or program.receives[op.step]:
                    after = op.after  # later messages start after these, and so after their mark
            steps[t].append(item)
            if isinstance(op, Send | Acquire):
                t += 1
            if isinstance(op, Acquire):
                steps[t].append(_Item(Wait))
        if seconds:
            steps[t].append(_Item(None, seconds))
        totals = frozenset((rows.kind, rows.tokens, rows.heads) for rows in program.totals)
        return _Steps(steps, operations, footprint(program, self.workload).total, totals)

    def _item(self, op: Op, program: Program) -> _Item | None:
        if isinstance(op, Compute):
            return self._kernel_call(op, program)
        if isinstance(op, Copy):
            size = 2 * sum(row_bytes(into, self.workload) for into, _ in op.pairs)
            return _Item(None, size / (self.costs.merge_gibps * GIB), "pack")
        if isinstance(op, Merge):
            size = sum(row_bytes(rows, self.workload) for rows in (op.into, *(part.rows for part in op.parts)))
            return _Item(None, size / (self.costs.merge_gibps * GIB), "merge")
        return None if isinstance(op, Release) else _Item(type(op))

    def _kernel_call(self, op: Compute, program: Program) -> _Item:
        key = op.call, op.queries.heads.parts
        if key not in self._calls:
            found = self.costs.call_seconds(op.call, op.queries.heads, self.workload, program.backward)
            self._calls[key] = found
        label = ""
        if self.spans is not None:
            homes = sorted(op.homes)
            label = str(homes[0]) if len(homes) == 1 else f"{homes[0]}…{homes[-1]}"
        return _Item(None, self._calls[key], label, min(op.homes))

    def _until_messages(self, rank: int, t: int, arrived: float) -> float:
        """Follow a rank until it starts the messages of step `t`; gives when these may start."""
        ready, marks = self.transfer[rank], self._marks[rank]
        now, busy = self.compute[rank], self.busy[rank]
        for op, seconds, label, home, ago in self._items[rank][t]:
            if op is None:
                if home >= 0:
                    seconds += self.costs.blocking * min(seconds, max(0.0, self.blocked[rank] - now))
                if self.spans is not None and seconds:
                    self.spans.append(Span(rank, "compute", now, now + seconds, label, t, home))
                now += seconds
                busy += seconds
            elif op is Mark:
                marks.append(now)
            elif op is Wait:
                if arrived > now:
                    self.exposed[rank] += arrived - now
                    now = arrived
            elif op is Acquire:
                ready = max(ready, now)
            elif ago:
                ready = max(ready, marks[-ago])
        self.compute[rank], self.busy[rank] = now, busy
        return ready
