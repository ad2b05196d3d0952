"""Rings over u nodes of m ranks that use all links of all nodes and all NICs (`(m-K_m-m)_u`, TASP section 3.1.3), and
the choice of rings for a cluster. Every ring adds a message to each step."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from .cluster import Cluster, Resource
from .hamiltonian import hamiltonian_cycles, hamiltonian_paths

Rings = tuple[tuple[int, ...], ...]
"""Rings that each list all ranks. A rank sends to the next rank of the ring, the last to the first."""

_MAX_OF_A_MESH = 64  # ranks; for more, cycles of all ranks have never been faster
_LEAST_GAIN = 1.01  # several rings must be faster than one ring by more than this factor


@lru_cache(maxsize=64)
def multi_node_rings(m: int, u: int) -> Rings:
    """Return edge-disjoint rings over the m·u ranks of u nodes, where rank r is rank `r % m` of node `r // m`.

    For u > 1 each ring goes through a node along one Hamiltonian path of K*_m and on to the next node, the last to the
    first. A rank starts one path of its node and ends one, so every NIC carries one ring in each direction; there are
    as many rings as `hamiltonian_paths`. For u = 1 the cycles of K*_m are the rings: a path's end would close its ring
    over an arc of another path. A single rank is a ring by itself.

    Raises:
        ValueError: m or u below 1.
    """
    if m < 1 or u < 1:
        raise ValueError(f"m={m}, u={u}: expected at least 1 rank in at least 1 node. Count ranks and nodes.")
    if u == 1:
        return hamiltonian_cycles(m) or ((0,),)
    return tuple(tuple(node * m + rank for node in range(u) for rank in path) for path in hamiltonian_paths(m))


def seconds_per_gib(cluster: Cluster, rings: Rings) -> float:
    """Return the time in which every rank passes on 1 GiB, split over the rings, which all move together.

    Messages that share a resource share its rate; the busiest resource sets the time. Latency is not counted.
    """
    load: defaultdict[Resource, float] = defaultdict(float)
    for ring in rings:
        for source, destination in zip(ring, (*ring[1:], ring[0]), strict=True):
            for resource in cluster.route(source, destination).resources if source != destination else ():
                load[resource] += 1 / len(rings)
    return max((gib / cluster.capacity(resource) for resource, gib in load.items()), default=0.0)


class Decomposition(NamedTuple):
    """A set of rings, and the seconds in which every rank passes on 1 GiB over them."""

    name: str
    rings: Rings
    seconds: float


def decompositions(cluster: Cluster) -> list[Decomposition]:
    """Return the sets of rings that TASP can use on a cluster of several ranks: one ring, all of `multi_node_rings`,
    and for up to 64 ranks on several nodes the cycles of all ranks as one mesh, the paper's `K_(m x u)`."""
    m, u, n = cluster.ranks_per_node, cluster.nodes, cluster.n
    sets: dict[str, Rings] = {"one ring": (tuple(range(n)),)}
    sets[f"K_{m}" if u == 1 else f"({m}-K_{m}-{m})_{u}"] = multi_node_rings(m, u)
    if u > 1 and n <= _MAX_OF_A_MESH:
        sets[f"K_({m} x {u})"] = hamiltonian_cycles(n)
    return [Decomposition(name, rings, seconds_per_gib(cluster, rings)) for name, rings in sets.items()]


def choose_rings(cluster: Cluster) -> tuple[Decomposition, str]:
    """Return the decomposition that passes blocks on in the least time over a cluster's links, and the reason.

    One ring is preferred unless others are faster by more than 1%, because every ring adds a message to each step.
    """
    one, *others = decompositions(cluster)
    best = min((each for each in others if len(each.rings) > 1), key=lambda each: each.seconds, default=one)
    if best.seconds * _LEAST_GAIN > one.seconds:
        best = one
    figures = ", ".join(f"{each.name} ({len(each.rings)}) {1e3 * each.seconds:.2f} ms" for each in (one, *others))
    return best, f"{best.name} on {cluster.name}; time to pass on 1 GiB from every rank: {figures}"
