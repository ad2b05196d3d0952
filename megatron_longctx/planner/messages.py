"""The time that the messages of a step take. Messages that share a link, a port or a NIC share its rate."""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from ..config.cluster import Cluster, Resource
from ..core.plans.plan import Move
from .cost import GIB, Costs, Workload

_PER_ROUTE = 3
"""The most resources of a route: the sender's, the receiver's and the link between them. Shorter routes are padded with
resource 0, whose rate is infinite."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class MessageTimes:
    """The times of messages between the first `n` ranks of a cluster, step by step."""

    def __init__(self, n: int, cluster: Cluster, workload: Workload, costs: Costs) -> None:
        self.n, self.cluster, self.workload, self.costs = n, cluster, workload, costs
        self._resources: list[Resource | None] = [None]
        self._numbers: dict[Resource, int] = {}
        self._capacities: dict[str, float] = {}  # bytes per second, keyed by kind: all resources of a kind are alike
        # Indexed by resource: bytes per second, and the seconds so far at this full rate.
        self._rates, self._busy = np.full(1, inf), np.zeros(1)
        self._used: dict[int, None] = {}  # resources in the order of first use
        # Routes within nodes: resources, bytes per second (0: not looked up yet) and latency. Other routes are found by
        # the ports at their ends.
        self._m = m = cluster.ranks_per_node
        self._routes, self._speeds = np.zeros((n * m, _PER_ROUTE), int), np.zeros(n * m)
        self._latencies = np.zeros(n * m)
        if n > m:
            ports = np.array([[self._number(each) for each in cluster.ports(rank)] for rank in range(n)])
            self._out, self._into = ports.T
            self._between_nodes = cluster.route(0, m)

    @property
    def used(self) -> dict[Resource, float]:
        """The seconds at full rate of every resource that was used, in the order of first use."""
        busy = self._busy.tolist()
        return {found: busy[number] for number in self._used if (found := self._resources[number]) is not None}

    def exchange(
        self, moves: Sequence[Move], ready: Sequence[float], before: list[float]
    ) -> tuple[list[float], list[float]]:
        """Return when each rank's messages of a step start (-1: it has none), and when they are done.

        Args:
            ready: the time from which each rank may start.
            before: the time at which a rank without messages is done.
        """
        if not moves:
            return [-1.0] * self.n, before
        sources, destinations = (np.array([move[i] for move in moves]) for i in (1, 2))
        token_bytes = self.workload.token_bytes
        sizes = np.array([b.tokens * token_bytes(b.kind, b.heads) for b, *_ in moves], float)
        may_start, starts, count = np.array(ready), np.zeros(self.n), np.zeros(self.n)
        both = np.maximum(may_start[sources], may_start[destinations])
        for ranks in (sources, destinations):
            np.maximum.at(starts, ranks, both)
            count += np.bincount(ranks, minlength=self.n)
        fixed = self.costs.step_s + self.costs.message_s * count
        done = np.where(count > 0, starts + fixed + self._wire(sources, destinations, sizes), before)
        return np.where(count > 0, starts, -1.0).tolist(), done.tolist()

    def all_to_all_seconds(self, num_bytes: int) -> float:
        """Return the time in which every rank sends each other one `num_bytes`, with a copy before and after."""
        others = self.n - 1
        pairs = [(rank, other) for rank in range(self.n) for other in range(self.n) if rank != other]
        sources, destinations = np.array(pairs, int).reshape(-1, 2).T
        wire = self._wire(sources, destinations, np.full(len(pairs), num_bytes, float))
        copies = 4 * self.n * num_bytes / (self.costs.merge_gibps * GIB)  # each reads and writes all
        return self.costs.step_s + 2 * others * self.costs.message_s + float(wire.max(initial=0.0)) + copies

    def _wire(self, sources: Ints, destinations: Ints, sizes: Floats) -> Floats:
        """Return the time that each rank's messages of a step travel.

        It follows from the rates of shared links or, if messages within a node were measured, from the bytes and the
        number of ranks that each rank exchanges messages with.
        """
        within = sources // self._m == destinations // self._m
        seconds = self._by_links(sources, destinations, sizes, within)
        wire = np.zeros(self.n)
        by_links = ~within if self.costs.messages else np.full(len(sizes), True)
        for ranks in (sources, destinations):
            np.maximum.at(wire, ranks[by_links], seconds[by_links])
        peers: dict[int, dict[int, float]] = {}  # bytes to each peer, keyed by rank; from each peer, by rank + n
        measured = (each[~by_links].tolist() for each in (sources, destinations, sizes))
        for source, destination, size in zip(*measured, strict=True):
            for rank, other in ((source, destination), (self.n + destination, source)):
                table = peers.setdefault(rank, {})
                table[other] = table.get(other, 0.0) + size
        for i, table in peers.items():
            ends = [i % self.n, *table]
            wire[ends] = np.maximum(wire[ends], self.costs.message_seconds(max(table.values()), len(table)))
        return wire

    def _by_links(self, sources: Ints, destinations: Ints, sizes: Floats, within: Bools) -> Floats:
        """Return the time of each message beside the others of the step."""
        pairs, between = sources * self._m + destinations % self._m, ~within
        for pair in dict.fromkeys(pairs[within & (self._speeds[pairs] == 0)].tolist()):
            self._look_up(pair)
        routes, speeds, latencies = self._routes[pairs], self._speeds[pairs], self._latencies[pairs]
        if between.any():
            routes[between, 0], routes[between, 1] = self._out[sources[between]], self._into[destinations[between]]
            routes[between, 2:] = 0
            speeds[between], latencies[between] = self._between_nodes.gibps * GIB, self._between_nodes.latency_s
        if len(self._resources) > len(self._rates):
            rates = [self._capacities[each.kind] if each else inf for each in self._resources]
            self._rates, self._busy = np.array(rates), np.append(self._busy, np.zeros(len(rates) - len(self._busy)))
        every = routes.ravel()
        self._used.update(dict.fromkeys(every[self._busy[every] == 0].tolist()))
        seconds = np.bincount(every, np.repeat(sizes, _PER_ROUTE), len(self._rates)) / self._rates
        self._busy += seconds
        # The busiest resource of a route determines the time, or its own rate if it is alone there.
        longest: Floats = np.maximum(seconds[routes].max(axis=1), sizes / speeds) + latencies
        return longest

    def _look_up(self, pair: int) -> None:
        source, place = divmod(pair, self._m)
        route = self.cluster.route(source, source // self._m * self._m + place)
        self._routes[pair, : len(route.resources)] = [self._number(each) for each in route.resources]
        self._speeds[pair], self._latencies[pair] = route.gibps * GIB, route.latency_s

    def _number(self, resource: Resource) -> int:
        if resource not in self._numbers:
            self._numbers[resource] = len(self._resources)
            self._resources.append(resource)
            if resource.kind not in self._capacities:
                self._capacities[resource.kind] = self.cluster.capacity(resource) * GIB
        return self._numbers[resource]
