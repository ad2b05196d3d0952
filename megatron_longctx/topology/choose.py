"""Which rings suit a cluster: as many as help, and no more, since every ring costs each step a message."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from .cluster import Cluster, Resource
from .multi_node import multi_node_rings
from .routing import Rings, Routing

_WORTH = 1.01  # several rings must beat one by more than this factor


class RingChoice(NamedTuple):
    """The rings to use, why in words, and how many times faster than one ring the links carry them."""

    rings: Rings
    reason: str
    gain: float


def seconds_per_gib(cluster: Cluster, rings: Rings) -> float:
    """Time for every rank to pass on 1 GiB, split over the rings that all move at once; latency left out.

    Messages that share a resource share its rate; the busiest resource sets the time.
    """
    load: defaultdict[Resource, float] = defaultdict(float)
    for _, source, destination in Routing(rings).arcs():
        for resource in cluster.route(source, destination).resources:
            load[resource] += 1 / len(rings)
    return max((gib / cluster.capacity(resource) for resource, gib in load.items()), default=0.0)


def choose_rings(cluster: Cluster) -> RingChoice:
    """One ring in rank order, or the largest set of edge-disjoint rings where that is faster, and the reason."""
    one: Rings = (tuple(range(cluster.n)),)
    m, u = cluster.ranks_per_node, cluster.nodes
    if cluster.n == 1:
        return RingChoice(one, "a single rank sends nothing", 1.0)
    several = multi_node_rings(m, u)
    gain = seconds_per_gib(cluster, one) / seconds_per_gib(cluster, several)
    count = len(several)
    if count == 1:
        return RingChoice(one, f"{_sizes(cluster)} leave room for one ring only", 1.0)
    if gain < _WORTH:
        limit = "the NICs that a node's ranks share" if u > 1 else "each rank's connection to the switch"
        return RingChoice(one, f"one ring fills {limit}; {count} rings would only add messages", 1.0)
    if u == 1:
        kind, per_rank = "Hamiltonian cycles of the node", f"{count} links of every rank instead of one"
    else:
        nics = min(count, cluster.network.nics if cluster.network else 0)
        kind = "rings of one Hamiltonian path per node"
        per_rank = f"{nics} NICs of every node instead of one" if nics > 1 else "all links within a node instead of few"
    note = "" if count == (m - 1 if u == 1 else m) else f" (the largest set there is for {m} ranks)"
    return RingChoice(several, f"{count} {kind}{note} use {per_rank}: {gain:.1f}x the rate of one ring", gain)


def rings_for(cluster: Cluster) -> Rings:
    """The best edge-disjoint rings for a cluster, each an order of all its ranks. `choose_rings` says why."""
    return choose_rings(cluster).rings


def _sizes(cluster: Cluster) -> str:
    return f"{cluster.nodes} node(s) of {cluster.ranks_per_node} rank(s)"
