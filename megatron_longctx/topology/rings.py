"""Rings over u nodes of m ranks that use all links of all nodes and all NICs, `(m-K_m-m)_u` of TASP section 3.1.3, and
as many of them as suit a cluster: every ring costs each step a message."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from .cluster import Cluster, Resource
from .hamiltonian import hamiltonian_cycles, hamiltonian_paths

Rings = tuple[tuple[int, ...], ...]
"""Each lists all ranks; a rank sends to the next one of the ring, the last to the first."""

_MOST_OF_A_MESH = 64  # ranks; above it is found in seconds and more, and never paid
_WORTH = 1.01  # several rings must beat one by more than this factor


@lru_cache(maxsize=64)
def multi_node_rings(m: int, u: int) -> Rings:
    """Edge-disjoint rings over the m·u ranks of u nodes, rank r being rank `r % m` of node `r // m`.

    For u > 1 each ring goes through a node along one Hamiltonian path of K*_m and on to the next node, the last to the
    first. A rank starts one path of its node and ends one, so it receives once and sends once over the network, and
    every NIC carries one ring each way. There are m rings (m = 3 and 5: 2 and 4, which are the most whose paths start
    and end at different ranks; the remaining NIC is idle).

    For u = 1 a path's end would close the ring within the node, over an arc that another path has: there the cycles of
    K*_m are the rings. A single rank is a ring of itself.

    Raises:
        ValueError: m or u below 1.
    """
    if m < 1 or u < 1:
        raise ValueError(f"m={m}, u={u}: expected at least 1 rank in at least 1 node. Count ranks and nodes.")
    if u == 1:
        return hamiltonian_cycles(m) or ((0,),)
    return tuple(tuple(node * m + rank for node in range(u) for rank in path) for path in hamiltonian_paths(m))


def seconds_per_gib(cluster: Cluster, rings: Rings) -> float:
    """Time for every rank to pass on 1 GiB, split over the rings that all move at once; latency left out.

    Messages that share a resource share its rate; the busiest resource sets the time.
    """
    load: defaultdict[Resource, float] = defaultdict(float)
    for ring in rings:
        for source, destination in zip(ring, (*ring[1:], ring[0]), strict=True):
            for resource in cluster.route(source, destination).resources if source != destination else ():
                load[resource] += 1 / len(rings)
    return max((gib / cluster.capacity(resource) for resource, gib in load.items()), default=0.0)


class Decomposition(NamedTuple):
    """A set of rings. seconds: of passing on 1 GiB from every rank, over the cluster's links."""

    name: str
    rings: Rings
    seconds: float


def decompositions(cluster: Cluster) -> list[Decomposition]:
    """The sets of rings of TASP that a cluster of several ranks may take: one ring; those of `multi_node_rings`, and on
    several nodes the cycles of all ranks as one mesh, the paper's `K_(m x u)`, up to 64 ranks."""
    m, u, n = cluster.ranks_per_node, cluster.nodes, cluster.n
    found: dict[str, Rings] = {"one ring": (tuple(range(n)),)}
    found[f"K_{m}" if u == 1 else f"({m}-K_{m}-{m})_{u}"] = multi_node_rings(m, u)
    if u > 1 and n <= _MOST_OF_A_MESH:
        found[f"K_({m} x {u})"] = hamiltonian_cycles(n)
    return [Decomposition(name, rings, seconds_per_gib(cluster, rings)) for name, rings in found.items()]


def choose(cluster: Cluster) -> tuple[Decomposition, str]:
    """The decomposition that a cluster's links pass blocks on with in the least time, and why: one ring, unless others
    are faster by more than 1%, since every ring costs each step a message."""
    one, *others = decompositions(cluster)
    best = min((each for each in others if len(each.rings) > 1), key=lambda each: each.seconds, default=one)
    if best.seconds * _WORTH > one.seconds:
        best = one
    figures = ", ".join(f"{each.name} ({len(each.rings)}) {1e3 * each.seconds:.2f} ms" for each in (one, *others))
    return best, f"{best.name} on {cluster.name}: by its links, a GiB from every rank a step takes {figures}"


def rings_for(cluster: Cluster) -> Rings:
    """Of the decomposition that `choose` takes."""
    return choose(cluster)[0].rings
