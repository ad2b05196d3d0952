"""Rings over u nodes of m ranks that use all links of all nodes and all NICs, `(m-K_m-m)_u` of TASP section 3.1.3, and
as many of them as suit a cluster: every ring costs each step a message."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from .cluster import Cluster, Resource
from .hamiltonian import hamiltonian_cycles, hamiltonian_paths

Rings = tuple[tuple[int, ...], ...]
"""Each lists all ranks; a rank sends to the next one of the ring, the last to the first."""

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


def rings_for(cluster: Cluster) -> Rings:
    """One ring in rank order, or the largest set of edge-disjoint rings where that is faster."""
    one: Rings = (tuple(range(cluster.n)),)
    several = multi_node_rings(cluster.ranks_per_node, cluster.nodes)
    faster = seconds_per_gib(cluster, several) * _WORTH <= seconds_per_gib(cluster, one)
    return several if faster and len(several) > 1 else one
