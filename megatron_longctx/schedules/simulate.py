"""The time and memory a plan takes on a described cluster, following what the executor does, without running it.

Every rank has two lanes. The compute lane runs each step's kernel calls once the previous step's messages are in, and
merges results. The transfer lane starts each step's messages after its previous ones and after the calls that they
depend on: those that computed the results it sends, those that read the buffers it fills. A message starts when both
of its ranks are ready; messages of one step that share a link, a port or a NIC share its rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..config import refuse
from ..topology import Cluster, Resource, Route
from .cost import GIB, Costs, Workload
from .plan import RESULTS, Attend, Block, Heads, Kind, Move, Plan
from .residency import Stay, assign, collector_paused, stays


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
    rank holds for this call, its own tensors included. spans: the time line, where it was asked for.
    """

    plan: Plan
    seconds: float
    compute_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    links: dict[Resource, float] = field(repr=False)
    peak_bytes: int
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
    workload: Workload,
    costs: Costs | None = None,
    *,
    timeline: bool = False,
) -> Simulation:
    """Price a forward or backward plan.

    Args:
        cluster: of as many ranks as the plan's, or more; rank r of the plan is its rank r.
        costs: None for what `cluster.device` says.
        timeline: also record what every rank does when.

    Raises:
        ValueError: a cluster with fewer ranks, or without the figures that are needed.
    """
    if cluster.n < plan.n:
        raise refuse("cluster", f"{cluster.name} of {cluster.n} ranks", f"{plan.n} or more", "Use cluster.resized().")
    with collector_paused():
        return _Run(plan, cluster, workload, costs or Costs.of_device(cluster.device), timeline).result()


class _Sized(NamedTuple):
    """A message with its bytes and its way."""

    size: float
    route: Route
    source: int
    destination: int


class _Run:
    def __init__(self, plan: Plan, cluster: Cluster, workload: Workload, costs: Costs, timeline: bool) -> None:
        self.plan, self.cluster, self.workload, self.costs = plan, cluster, workload, costs
        n = plan.n
        self.compute = [0.0] * n  # when each rank's compute lane is free
        self.transfer = [0.0] * n
        self.busy = [0.0] * n
        self.exposed = [0.0] * n
        self.blocked = [0.0] * n  # until when a message of this step holds processors of a rank
        self.used: dict[Resource, float] = {}  # seconds at full rate
        self.spans: list[Span] | None = [] if timeline else None
        self._routes: dict[tuple[int, int], Route] = {}
        self._rates: dict[str, float] = {}
        self._calls: dict[tuple[int, int, bool, int], float] = {}
        self._parts: list[set[tuple[Kind, Heads]]] = [set() for _ in range(n)]
        for step in plan.steps:
            for block, source, _, _ in step.moves:
                if block.home == source and block.heads.parts > 1:
                    self._parts[source].add((block.kind, block.heads))
        self._single = [_is_single(plan, rank) for rank in range(n)]
        self._stays = stays(plan)
        # Own blocks that are copied among those of others, by rank.
        self._among = [_own_among(rank_stays, rank) for rank, rank_stays in enumerate(self._stays)]
        self._packs_kv = [_packs_kv(plan, rank, self._among[rank]) for rank in range(n)]

    def result(self) -> Simulation:
        n, steps = self.plan.n, self.plan.steps
        for rank in range(n):
            self._pack(rank)
        begin = list(self.compute)
        marks: list[list[float]] = []
        arrived: list[list[Move]] = [[] for _ in range(n)]
        for t, (step, after) in enumerate(zip(steps, _waits(self.plan, self._stays), strict=True)):
            for rank in range(n):
                self._wait(rank, t)
            ready = [
                max(self.transfer[rank], marks[after[rank]][rank] if after[rank] >= 0 else begin[rank])
                for rank in range(n)
            ]
            done = self._exchange(step.moves, ready, t)
            self.blocked = [late if late > early else 0.0 for early, late in zip(self.transfer, done, strict=True)]
            for rank in range(n):
                self._copy_own(rank, t)
                self._merge(rank, arrived[rank], t)
                for attend in step.attends[rank]:
                    self._attend(rank, attend, t)
            marks.append(list(self.compute))
            arrived = [[] for _ in range(n)]
            for move in step.moves:
                if move.block.kind in RESULTS and move.destination == move.block.home:
                    arrived[move.destination].append(move)
            self.transfer = done
        for rank in range(n):
            self._wait(rank, len(steps))
            self._merge(rank, arrived[rank], len(steps))
        return self._simulation()

    def _simulation(self) -> Simulation:
        end = max(self.compute, default=0.0)
        idle = tuple(end - busy - exposed for busy, exposed in zip(self.busy, self.exposed, strict=True))
        return Simulation(
            plan=self.plan,
            seconds=end,
            compute_s=tuple(self.busy),
            exposed_s=tuple(self.exposed),
            idle_s=idle,
            links={resource: used / end for resource, used in self.used.items()} if end else {},
            peak_bytes=peak_bytes(self.plan, self.workload),
            spans=tuple(self.spans or ()),
        )

    def _pack(self, rank: int) -> None:
        """Keys and values are packed into one tensor, and parts of the heads are copied together to be sent."""
        if self.plan.n > 1:
            size = self.workload.token_bytes(Kind.KV) if self._packs_kv[rank] else 0
            size += sum(self.workload.token_bytes(kind, heads) for kind, heads in self._parts[rank])
            size *= 2 * self.plan.layout.num_tokens(rank)
            self._work(rank, size / (self.costs.merge_gibps * GIB), "pack", -1)

    def _copy_own(self, rank: int, t: int) -> None:
        """Own rows put among those of other ranks that are arriving."""
        size = sum(map(self.workload.block_bytes, self._among[rank].get(t, ())))
        if size:
            self._work(rank, 2 * size / (self.costs.merge_gibps * GIB), "pack", t)

    def _wait(self, rank: int, t: int) -> None:
        late = self.transfer[rank] - self.compute[rank]
        if late > 0:
            self.exposed[rank] += late
            self.compute[rank] = self.transfer[rank]

    def _merge(self, rank: int, arrived: list[Move], t: int) -> None:
        size = sum(self.workload.merge_bytes(move.block) for move in arrived)
        if size:
            self._work(rank, size / (self.costs.merge_gibps * GIB), "merge", t)

    def _attend(self, rank: int, attend: Attend, t: int) -> None:
        homes = {key.home for key in attend.keys}
        label = str(min(homes)) if len(homes) == 1 else f"{min(homes)}…{max(homes)}"
        key = (attend.num_queries, attend.num_keys, attend.causal, attend.heads.parts)
        if key not in self._calls:
            self._calls[key] = self.costs.call_seconds(attend, self.workload, self.plan.backward)
        seconds = self._calls[key]
        beside = min(seconds, max(0.0, self.blocked[rank] - self.compute[rank]))
        self._work(rank, seconds + self.costs.blocking * beside, label, t, min(homes))
        size = 0 if self._single[rank] else self._copied_bytes(attend, rank)
        if size:
            self._work(rank, size / (self.costs.merge_gibps * GIB), "merge", t)

    def _copied_bytes(self, attend: Attend, rank: int) -> int:
        """Bytes read and written beside a call: results merged or made ready to be sent, scattered inputs joined."""
        workload, backward, size = self.workload, self.plan.backward, 0
        results = [query._replace(kind=Kind.DQ if backward else Kind.OUT) for query in attend.queries]
        results += [key._replace(kind=Kind.DKV) for key in attend.keys] if backward else []
        for result in results:
            size += workload.merge_bytes(result) if result.home == rank else 2 * workload.block_bytes(result)
        inputs = self.plan.inputs(attend, rank)
        for blocks in (inputs[: len(attend.queries)], inputs[len(attend.queries) :]):
            own = [block for block in blocks if block.home == rank]
            if not 0 < len(own) < len(blocks):
                continue
            if {block for among in self._among[rank].values() for block in among}.isdisjoint(own):
                size += 2 * sum(map(workload.block_bytes, blocks))  # partly at home, partly in a buffer
        return size

    def _work(self, rank: int, seconds: float, label: str, t: int, home: int = -1) -> None:
        start = self.compute[rank]
        self.compute[rank] = start + seconds
        self.busy[rank] += seconds
        if self.spans is not None:
            self.spans.append(Span(rank, "compute", start, start + seconds, label, t, home))

    def _exchange(self, moves: tuple[Move, ...], ready: list[float], t: int) -> list[float]:
        """When every rank's messages of a step are done."""
        done = list(self.transfer)
        if not moves:
            return done
        load: dict[Resource, float] = {}
        sized: list[_Sized] = []
        for block, source, destination, _ in moves:
            route = self._route(source, destination)
            size = self.workload.block_bytes(block)
            sized.append(_Sized(size, route, source, destination))
            for resource in route.resources:
                load[resource] = load.get(resource, 0.0) + size
        slowest = {resource: size / self._capacity(resource) for resource, size in load.items()}
        for resource, seconds in slowest.items():
            self.used[resource] = self.used.get(resource, 0.0) + seconds
        count = [0] * self.plan.n
        start = [0.0] * self.plan.n
        for _, _, source, destination in sized:
            count[source] += 1
            count[destination] += 1
            both = max(ready[source], ready[destination])
            start[source], start[destination] = max(start[source], both), max(start[destination], both)
        wire = self._wire(sized, slowest)
        for rank in range(self.plan.n):
            if count[rank]:
                fixed = self.costs.step_s + self.costs.message_s * count[rank]
                done[rank] = start[rank] + fixed + wire[rank]
                if self.spans is not None:
                    self.spans.append(Span(rank, "transfer", start[rank], done[rank], f"step {t}", t))
        return done

    def _wire(self, sized: list[_Sized], slowest: dict[Resource, float]) -> list[float]:
        """How long every rank's messages of a step are on their way.

        By the rates of the links they share; or, where messages between ranks of a node were measured, by the bytes
        and the number of ranks that each exchanges messages with.
        """
        wire = [0.0] * self.plan.n
        peers: list[dict[int, float]] = [{} for _ in range(2 * self.plan.n)]  # bytes to others, then from them
        for size, route, source, destination in sized:
            if self.costs.messages and self.cluster.node_of(source) == self.cluster.node_of(destination):
                for table, other in ((peers[source], destination), (peers[self.plan.n + destination], source)):
                    table[other] = table.get(other, 0.0) + size
                continue
            shared = max(slowest[resource] for resource in route.resources)
            seconds = max(shared, size / (route.gibps * GIB)) + route.latency_s
            wire[source], wire[destination] = max(wire[source], seconds), max(wire[destination], seconds)
        for i, table in enumerate(peers):
            if table:
                seconds = self.costs.message_seconds(max(table.values()), len(table))
                for rank in (i % self.plan.n, *table):
                    wire[rank] = max(wire[rank], seconds)
        return wire

    def _capacity(self, resource: Resource) -> float:
        """Bytes per second; all resources of a kind are alike."""
        if resource.kind not in self._rates:
            self._rates[resource.kind] = self.cluster.capacity(resource) * GIB
        return self._rates[resource.kind]

    def _route(self, source: int, destination: int) -> Route:
        if (source, destination) not in self._routes:
            self._routes[source, destination] = self.cluster.route(source, destination)
        return self._routes[source, destination]


def _waits(plan: Plan, found: list[list[Stay]]) -> Iterator[list[int]]:
    """By step and rank, the last step whose calls the step's messages have to wait for (-1: none)."""
    after = [[-1] * plan.n for _ in plan.steps]
    for rank, rank_stays in enumerate(found):
        for stay, until in zip(rank_stays, assign(rank_stays)[1], strict=True):
            after[stay.first][rank] = max(after[stay.first][rank], until)
    for t, step in enumerate(plan.steps):
        for block, source, _, _ in step.moves:
            if block.kind in RESULTS and block.origin == source:
                after[t][source] = max(after[t][source], t - 1)
    return iter(after)


def _is_single(plan: Plan, rank: int) -> bool:
    """Whether one call gives all of a rank's own results, so that nothing is merged."""
    calls = [attend for step in plan.steps for attend in step.attends[rank]]
    return plan.n == 1 and len(calls) == 1


def _own_among(rank_stays: list[Stay], rank: int) -> dict[int, list[Block]]:
    """By step, a rank's own blocks that are copied among those of others that arrive in it."""
    found: dict[int, list[Block]] = {}
    for stay in rank_stays:
        own = [block for block in stay.blocks if block.home == rank and block.kind not in RESULTS]
        if own:
            found.setdefault(stay.first, []).extend(own)
    return found


def _packs_kv(plan: Plan, rank: int, among: dict[int, list[Block]]) -> bool:
    """Whether a rank's own keys and values are read as they travel: sent as a whole, or attended where they lie."""
    copied = {block for blocks in among.values() for block in blocks}
    sent = (m.block for step in plan.steps for m in step.moves if m.source == m.block.home == rank)
    read = (b for step in plan.steps for attend in step.attends[rank] for b in plan.inputs(attend, rank))
    return any(block.kind is Kind.KV and block.heads.parts == 1 for block in sent) or any(
        block.kind is Kind.KV and block.home == rank and block not in copied for block in read
    )


def kept_bytes(plan: Plan, workload: Workload) -> int:
    """Most that a rank keeps of a call from forward to backward because `plan.kept` says so, its own share of what it
    keeps as one with other ranks' included."""
    most = 0
    for rank, kept in enumerate(plan.kept):
        blocks = set(kept)
        for attend in (attend for step in plan.steps for attend in step.attends[rank]):
            blocks.update(attend.queries if plan.keeps_queries(attend, rank) else ())
            blocks.update(attend.keys if plan.keeps_keys(attend, rank) else ())
        results = [block._replace(kind=Kind.OUT) for block in blocks if block.kind is Kind.Q]
        most = max(most, sum(map(workload.block_bytes, (*blocks, *results))))
    return most


def reads_own(plan: Plan) -> bool:
    """Whether ranks read their own q, k, v and out in a backward plan, or have kept all that they attend."""
    kinds = (Kind.Q_GRAD, Kind.KV)
    sent = any(move.block.kind in kinds for step in plan.steps for move in step.moves)
    return sent or any(
        block.kind in kinds
        for step in plan.steps
        for rank, attends in enumerate(step.attends)
        for attend in attends
        for block in plan.inputs(attend, rank)
    )


def peak_bytes(plan: Plan, workload: Workload) -> int:
    """Most bytes a rank holds for one call: inputs, what is saved for backward, accumulators, buffers, results to send.

    What the caller keeps beside them (the projections' own inputs, other layers' saved tensors) is not in it, nor what
    a kernel needs for itself.
    """
    tokens = max(map(plan.layout.num_tokens, range(plan.n)), default=0)
    q, kv = workload.token_bytes(Kind.Q), workload.token_bytes(Kind.KV)
    out = workload.token_bytes(Kind.OUT)
    accumulated = workload.accumulator_bytes // workload.element_bytes
    if all(len({attend.heads for attend in calls}) == len(calls) for calls in _calls(plan)):
        accumulated = min(1, plan.n - 1)  # nothing is summed: heads go to their places, or one result is all of it
    if plan.backward:  # q, out, grad of out, lse, packed kv; gradients and their sums
        inputs = workload.token_bytes(Kind.Q_GRAD) + kv if reads_own(plan) else workload.token_bytes(Kind.GRAD)
        own = tokens * (inputs + (1 + accumulated) * (q + kv))
    else:  # q, k, v, packed kv, out and its sum
        own = tokens * (q + kv * (2 if plan.n > 1 else 1) + out + accumulated * q)
    buffers = sum(tokens * workload.token_bytes(kind) for kind, tokens in plan.buffers)
    return own + buffers + kept_bytes(plan, workload) + outgoing_bytes(plan, workload)


def _calls(plan: Plan) -> list[list[Attend]]:
    """Of every rank."""
    return [[attend for step in plan.steps for attend in step.attends[rank]] for rank in range(plan.n)]


def outgoing_bytes(plan: Plan, workload: Workload) -> int:
    """Results of one step that wait to be sent, on the rank with the most of them."""
    most = 0
    for step in plan.steps:
        sizes: dict[int, int] = {}
        for move in step.moves:
            if move.block.kind in RESULTS and move.block.origin == move.source:
                sizes[move.source] = sizes.get(move.source, 0) + workload.block_bytes(move.block)
        most = max(most, max(sizes.values(), default=0))
    return most
