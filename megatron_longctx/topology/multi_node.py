"""Rings over u nodes of m ranks that use all links of all nodes and all NICs: `(m-K_m-m)_u` of TASP section 3.1.3."""

from __future__ import annotations

from functools import lru_cache

from .hamiltonian import hamiltonian_cycles, hamiltonian_paths
from .routing import Rings


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
