"""How long the messages of a step take; those that share a link, a port or a NIC share its rate."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from ..topology import Cluster, Resource
from .cost import GIB, Costs, Workload
from .plan import Move

_MOST = 3
"""Resources of a route: a sender's, a receiver's and the link between them. Number 0 stands where it has fewer."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Messages:
    """Messages between the first `n` ranks of a cluster, priced step by step."""

    def __init__(self, n: int, cluster: Cluster, workload: Workload, costs: Costs) -> None:
        self.n, self.cluster, self.workload, self.costs = n, cluster, workload, costs
        self._resources: list[Resource | None] = [None]
        self._numbers: dict[Resource, int] = {}
        self._capacities: dict[str, float] = {}
        # By resource, bytes per second and, by now, seconds at full rate.
        self._rates, self._used = np.full(1, inf), np.zeros(1)
        self._in_use: dict[int, None] = {}  # in the order of their first use
        # Routes inside of nodes: resources, bytes per second (0: not looked up yet) and latency. Others by their ends.
        self._m = m = cluster.ranks_per_node
        self._routes, self._speeds, self._latencies = np.zeros((n * m, _MOST), int), np.zeros(n * m), np.zeros(n * m)
        if n > m:
            ports = np.array([[self._number(each) for each in cluster.ports(rank)] for rank in range(n)])
            self._out, self._into = ports.T
            self._between = cluster.route(0, m)

    @property
    def used(self) -> dict[Resource, float]:
        """Seconds at full rate of every resource that was used, in the order of their first use."""
        used = self._used.tolist()
        return {found: used[number] for number in self._in_use if (found := self._resources[number]) is not None}

    def exchange(
        self, moves: tuple[Move, ...], ready: list[float], before: list[float]
    ) -> tuple[list[float], list[float]]:
        """When every rank's messages of a step start (-1: it has none), and when they are done.

        Args:
            moves: of the step. ready: when every rank may start. before: when a rank without messages is done.
        """
        if not moves:
            return [-1.0] * self.n, before
        sources, destinations = (np.array([move[i] for move in moves]) for i in (1, 2))
        sizes = np.array([self.workload.block_bytes(move[0]) for move in moves], float)
        may, starts = np.array(ready), np.zeros(self.n)
        both = np.maximum(may[sources], may[destinations])
        count = np.zeros(self.n)
        for ranks in (sources, destinations):
            np.maximum.at(starts, ranks, both)
            count += np.bincount(ranks, minlength=self.n)
        fixed = self.costs.step_s + self.costs.message_s * count
        done = np.where(count > 0, starts + fixed + self._wire(sources, destinations, sizes), before)
        return np.where(count > 0, starts, -1.0).tolist(), done.tolist()

    def _wire(self, sources: Ints, destinations: Ints, sizes: Floats) -> Floats:
        """How long every rank's messages of a step are on their way.

        By the rates of the links they share; or, where messages between ranks of a node were measured, by the bytes
        and the number of ranks that each exchanges messages with.
        """
        inside = sources // self._m == destinations // self._m
        seconds = self._by_links(sources, destinations, sizes, inside)
        wire = np.zeros(self.n)
        by_links = ~inside if self.costs.messages else np.full(len(sizes), True)
        for ranks in (sources, destinations):
            np.maximum.at(wire, ranks[by_links], seconds[by_links])
        peers: dict[int, dict[int, float]] = {}  # bytes to others, by rank, and from them, by rank and n
        measured = (each[~by_links].tolist() for each in (sources, destinations, sizes))
        for source, destination, size in zip(*measured, strict=True):
            for rank, other in ((source, destination), (self.n + destination, source)):
                table = peers.setdefault(rank, {})
                table[other] = table.get(other, 0.0) + size
        for i, table in peers.items():
            both = [i % self.n, *table]
            wire[both] = np.maximum(wire[both], self.costs.message_seconds(max(table.values()), len(table)))
        return wire

    def _by_links(self, sources: Ints, destinations: Ints, sizes: Floats, inside: Bools) -> Floats:
        """By message, its time beside the others of the step."""
        near, outside = sources * self._m + destinations % self._m, ~inside
        for pair in dict.fromkeys(near[inside & (self._speeds[near] == 0)].tolist()):
            self._look_up(pair, *divmod(pair, self._m))
        routes, speeds, latencies = self._routes[near], self._speeds[near], self._latencies[near]
        if outside.any():
            routes[outside, 0], routes[outside, 1] = self._out[sources[outside]], self._into[destinations[outside]]
            routes[outside, 2:] = 0
            speeds[outside], latencies[outside] = self._between.gibps * GIB, self._between.latency_s
        if len(self._resources) > len(self._rates):
            rates = [self._capacities[each.kind] if each else inf for each in self._resources]
            self._rates, self._used = np.array(rates), np.append(self._used, np.zeros(len(rates) - len(self._used)))
        every = routes.ravel()
        self._in_use.update(dict.fromkeys(every[self._used[every] == 0].tolist()))
        # Of a route's resources, the one with the most to carry.
        slowest = np.bincount(every, np.repeat(sizes, _MOST), len(self._rates)) / self._rates
        self._used += slowest
        longest: Floats = np.maximum(slowest[routes].max(axis=1), sizes / speeds) + latencies
        return longest

    def _look_up(self, pair: int, source: int, place: int) -> None:
        route = self.cluster.route(source, source // self._m * self._m + place)
        self._routes[pair, : len(route.resources)] = [self._number(each) for each in route.resources]
        self._speeds[pair], self._latencies[pair] = route.gibps * GIB, route.latency_s

    def _number(self, resource: Resource) -> int:
        """All resources of a kind are alike."""
        if resource not in self._numbers:
            self._numbers[resource] = len(self._resources)
            self._resources.append(resource)
            if resource.kind not in self._capacities:
                self._capacities[resource.kind] = self.cluster.capacity(resource) * GIB
        return self._numbers[resource]
