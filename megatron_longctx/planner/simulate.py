"""The simulated time of a plan on a described cluster: its recordings are priced operation by operation, not run.

Every rank has two lanes. The compute lane issues the recorded operations: kernel calls, copies, merges and waits. The
transfer lane starts each step's messages after the previous ones and after the operation that the recording names. A
message starts when both of its ranks are ready. Messages of one step that share a link, a port or a NIC share its rate.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..config.cluster import Cluster, Resource
from ..config.progress import Progress
from ..core.errors import refuse
from ..core.plans.plan import Plan, collector_paused
from ..core.plans.recorder import Recorder
from ..core.plans.recording import Acquire, Compute, Copy, Merge, Op, Recording, Release, Send, Wait
from ..core.plans.workload import Target
from .cost import GIB, Costs, Workload
from .footprint import footprint, row_bytes
from .messages import MessageTimes


class Span(NamedTuple):
    """A span of time on a rank's lane, in seconds."""

    rank: int
    lane: str  # compute | transfer
    start: float
    stop: float
    label: str
    step: int
    home: int = -1  # a rank whose keys a kernel call attends to; -1 for others


@dataclass(frozen=True)
class Simulation:
    """The simulated pass of a plan, in seconds and bytes."""

    plan: Plan
    seconds: float
    compute_s: tuple[float, ...]  # kernel calls, merges and copies, one number per rank
    exposed_s: tuple[float, ...]  # waits for messages between them; the rest is idle, until the last rank is done
    links: dict[Resource, float] = field(repr=False)  # the share of the time that each resource is busy
    peak_bytes: int
    """The most memory of a rank for this call, with its own tensors and send memory but without kernel workspaces."""
    spans: tuple[Span, ...] = field(default=(), repr=False)  # the timeline, if it was recorded

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        total = self.seconds * self.plan.n
        return 1 - sum(self.compute_s) / total if total else 0.0

    @property
    def busiest_link(self) -> tuple[Resource, float] | None:
        return max(self.links.items(), key=lambda item: item[1]) if self.links else None


def simulate(
    plan: Plan, cluster: Cluster, target: Target | Workload, costs: Costs | None = None, *, timeline: bool = False
) -> Simulation:
    """Simulate a forward or backward plan. Refuse a cluster with too few ranks, or no figures for its device.

    Args:
        cluster: the ranks' cluster, with `plan.n` ranks or more; rank r of the plan is its rank r.
        target: what the plan is recorded for. A workload alone means point-to-point messages, and a kernel that
            supports full rectangles and causal squares, one per call.
        costs: None for those that `cluster.device` describes.
        timeline: record what every rank does when.
    """
    if cluster.n < plan.n:
        raise refuse("cluster", f"{cluster.name} of {cluster.n} ranks", f"{plan.n} or more", "Use cluster.resized().")
    target = target if isinstance(target, Target) else Target(target)
    with collector_paused():
        return _Simulator(plan, cluster, target, costs or Costs.of_cluster(cluster), timeline).run()


class _Mark(NamedTuple):
    """The time at which later messages may start."""


class _Event(NamedTuple):
    """The next action of a rank: work of `seconds`, or one of the operations that involve messages.

    Those are Wait, _Mark, Acquire, which makes the rank ready for messages now, and Send, which makes it ready as of
    `marks` marks ago (0: from the beginning).
    """

    op: type[Op | _Mark] | None
    seconds: float = 0.0
    label: str = ""
    home: int = -1
    marks: int = 0


class _Simulator:
    def __init__(self, plan: Plan, cluster: Cluster, target: Target, costs: Costs, timeline: bool) -> None:
        self.plan, self.cluster, self.workload, self.costs = plan, cluster, target.workload, costs
        n = plan.n
        self.compute = [0.0] * n  # when each rank's compute lane is free
        self.transfer = [0.0] * n
        self.busy = [0.0] * n
        self.exposed = [0.0] * n
        self.blocked = [0.0] * n  # until when this step's messages occupy processors of each rank
        self.spans: list[Span] | None = [] if timeline else None
        self._call_seconds: dict[object, float] = {}
        self.peak_bytes = 0
        self._events: list[list[list[_Event]]] = []
        self._marks: list[list[float]] = [[] for _ in range(n)]
        recorder = Recorder(plan, target)
        with Progress(f"simulating {plan.name}", n, "ranks") as progress:  # 1,024 ranks may take minutes
            for rank in progress.each(range(n)):
                self._events.append(self._price(recorder.record(rank)))

    def run(self) -> Simulation:
        n = self.plan.n
        arrived: list[float] = [0.0] * n
        messages = MessageTimes(n, self.cluster, self.workload, self.costs)
        for t, step in enumerate(self.plan.steps):
            ready = [self._run_until_messages(rank, t, arrived[rank]) for rank in range(n)]
            starts, done = messages.exchange(step.moves, ready, self.transfer)
            if self.spans is not None:
                for rank, (start, stop) in enumerate(zip(starts, done, strict=True)):
                    if start >= 0:
                        self.spans.append(Span(rank, "transfer", start, stop, f"step {t}", t))
            self.blocked = [late if late > early else 0.0 for early, late in zip(self.transfer, done, strict=True)]
            self.transfer = arrived = done
        for rank in range(n):
            self._run_until_messages(rank, len(self.plan.steps), arrived[rank])
        end = max(self.compute, default=0.0)
        return Simulation(
            plan=self.plan,
            seconds=end,
            compute_s=tuple(self.busy),
            exposed_s=tuple(self.exposed),
            links={resource: used / end for resource, used in messages.used.items()} if end else {},
            peak_bytes=self.peak_bytes,
            spans=tuple(self.spans or ()),
        )

    def _price(self, recording: Recording) -> list[list[_Event]]:
        """Price the operations, up to the start of each step's messages and behind the last of them.

        Without a timeline, consecutive work is summed up.
        """
        sum_up = self.spans is None and not self.costs.blocking
        events: list[list[_Event]] = [[] for _ in range(len(recording.receives) + 1)]
        t, seconds, marks, after = 0, 0.0, dict[int, int](), -1
        for number, op in _in_device_order(recording):
            if isinstance(op, Release):
                continue
            event = _Event(_Mark) if isinstance(op, _Mark) else self._event(op, recording)
            if sum_up and event.op is None:
                seconds += event.seconds
                continue
            if seconds:
                events[t].append(_Event(None, seconds))
                seconds = 0.0
            if isinstance(op, Wait):
                t = max(t, op.step + 1)
            elif isinstance(op, _Mark):
                marks[number] = len(marks)
            elif isinstance(op, Send | Acquire):
                t = max(t, op.step)
            if isinstance(op, Send) and recording.after[op.step] > after:
                event = event._replace(marks=len(marks) - marks[recording.after[op.step]])
                if recording.sends.messages[op.step] or recording.receives[op.step]:
                    after = recording.after[op.step]  # later messages start after these, and so after their mark
            events[t].append(event)
            if isinstance(op, Send | Acquire):
                t += 1
            if isinstance(op, Acquire):
                events[t].append(_Event(Wait))
        if seconds:
            events[t].append(_Event(None, seconds))
        self.peak_bytes = max(self.peak_bytes, footprint(recording, self.workload).total)
        return events

    def _event(self, op: Op, recording: Recording) -> _Event:
        if isinstance(op, Copy):
            num_bytes = 2 * sum(row_bytes(into, self.workload) for into, _ in op.pairs)
            return _Event(None, num_bytes / (self.costs.merge_gibps * GIB), "pack")
        if isinstance(op, Merge):
            num_bytes = sum(row_bytes(rows, self.workload) for rows in (op.into, *[part.rows for part in op.parts]))
            return _Event(None, num_bytes / (self.costs.merge_gibps * GIB), "merge")
        if not isinstance(op, Compute):
            return _Event(type(op))
        key = op.call, op.queries.heads.parts
        seconds = self._call_seconds.get(key)
        if seconds is None:
            seconds = self.costs.call_seconds(op.call, op.queries.heads, self.workload, recording.backward)
            self._call_seconds[key] = seconds
        first, last = min(op.homes), max(op.homes)
        return _Event(None, seconds, str(first) if first == last else f"{first}…{last}", first)

    def _run_until_messages(self, rank: int, t: int, arrived: float) -> float:
        """Run a rank until it starts the messages of step `t`; return when these may start."""
        ready, marks = self.transfer[rank], self._marks[rank]
        now, busy = self.compute[rank], self.busy[rank]
        for op, seconds, label, home, marks_ago in self._events[rank][t]:
            if op is None:
                if home >= 0:
                    seconds += self.costs.blocking * min(seconds, max(0.0, self.blocked[rank] - now))
                if self.spans is not None and seconds:
                    self.spans.append(Span(rank, "compute", now, now + seconds, label, t, home))
                now += seconds
                busy += seconds
            elif op is _Mark:
                marks.append(now)
            elif op is Wait:
                if arrived > now:
                    self.exposed[rank] += arrived - now
                    now = arrived
            elif op is Acquire:
                ready = max(ready, now)
            elif marks_ago:
                ready = max(ready, marks[-marks_ago])
        self.compute[rank], self.busy[rank] = now, busy
        return ready


def _in_device_order(recording: Recording) -> Iterator[tuple[int, Op | _Mark]]:
    """Yield the operations with their numbers, and the marks behind what messages wait for.

    The host may start the first messages behind a kernel call. The device starts them as early.
    """
    marks, ops = set(recording.after.values()), list(enumerate(recording.ops))
    first = next((at for at, op in ops if isinstance(op, Send)), 0)
    if first and isinstance(recording.ops[first - 1], Compute) and first - 1 not in marks:
        ops[first - 1 : first + 1] = ops[first], ops[first - 1]
    for number, op in ops:
        yield number, op
        if number in marks:
            yield number, _Mark()
