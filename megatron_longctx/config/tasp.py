"""TASP: several concurrent rings over edge-disjoint Hamiltonian cycles of the topology (paper, sections 3 and 4).

Every rank's keys are cut into one piece per ring. All rings move in each step, so a full mesh of n ranks uses all
n(n-1) links where one ring uses n. The zigzag layout balances causal work as it does for one ring: piece i of a rank is
the i-th part of its front half and, mirrored, of its back half.

The mode depends on how ranks are linked, so it is here and not in `core`. Importing this module registers it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..core.plans.modes.mode import Mode, ModeOptions
from ..core.plans.plan import Block, Kind, Move, Plan, Step
from ..core.plans.visibility import Visibility
from .cluster import Cluster, Resource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tasp(Mode):
    """rings: each a permutation of all ranks. A single rank needs none."""

    rings: Rings = field(default=(), repr=False)

    name = "tasp"
    layout = "zigzag"

    @classmethod
    def from_options(cls, options: ModeOptions, n: int) -> Mode:
        if options.cluster is None:
            return cls(hamiltonian_cycles(n))
        assert isinstance(options.cluster, Cluster)
        chosen, why = choose_rings(options.cluster)
        logger.info("tasp uses %s", why)
        return cls(chosen.rings)

    def num_messages(self, n: int, length: int) -> int:
        return n * n * len(self.rings)

    def plan(self, visible: Visibility) -> Plan:
        """In step t, rank r holds in every ring the piece of the rank t places before it in that ring."""
        n, rings = visible.queries.n, self.rings
        if any(sorted(ring) != list(range(n)) for ring in rings) or (n > 1 and not rings):
            raise ValueError(f"rings={rings}: expected at least one ring that passes each of the {n} ranks once.")
        place = [{rank: i for i, rank in enumerate(ring)} for ring in rings]
        hops: dict[tuple[int, int], list[list[Block]]] = {}  # keyed by ring and home rank
        for i, ring in enumerate(rings):
            for at, home in enumerate(ring):
                pieces = _pieces(visible, home, i, len(rings))
                hops[i, home] = visible.needed_per_hop(home, [*ring[at + 1 :], *ring[:at]], pieces)
        steps: list[Step] = []
        held = visible.all_keys
        for t in range(n):
            arriving: list[list[tuple[Block, int]]] = [[] for _ in range(n)]
            for i, ring in enumerate(rings) if t + 1 < n else ():
                for r in range(n):
                    home = ring[(place[i][r] - t) % n]
                    to = ring[(place[i][r] + 1) % n]
                    arriving[to] += [(piece, r) for piece in hops[i, home][t]]
            for r in range(n):  # pieces that the same queries see arrive side by side
                arriving[r].sort(key=lambda item: (visible.first_query(r, item[0]), item[0]))
            moves = tuple(Move(piece, source, r) for r in range(n) for piece, source in arriving[r])
            steps.append(Step(moves, tuple(visible.attend(r, held[r]) for r in range(n))))
            held = [[piece for piece, _ in arriving[r]] for r in range(n)]
        return Plan(self.name, visible.mask, visible.queries, visible.keys, tuple(steps))


def _pieces(visible: Visibility, home: int, ring: int, rings: int) -> list[Block]:
    """Return piece `ring` of each of the home's spans, in alternate spans counted from the back (mirrored)."""
    blocks = []
    for number, (start, span) in enumerate(visible.keys.slot_spans(home)):
        i = ring if number % 2 == 0 else rings - 1 - ring
        low, high = start + len(span) * i // rings, start + len(span) * (i + 1) // rings
        if low < high:
            blocks.append(Block(Kind.KV, home, low, high))
    return blocks


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
    """
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


Vertices = tuple[int, ...]

# K*_n, the complete digraph with an arc in each direction between any two vertices, decomposes into n-1 edge-disjoint
# directed Hamiltonian cycles for every n except 4 and 6 (Tillson 1980). The constructions:
#
# - odd n: the rows of a row-complete Latin square of order n-1, each closed through one more vertex. Every arc between
#   old vertices is in one row; every old vertex ends one row and starts one.
# - even n from 8 to 32: take the n-2 cycles of K*_(n-1) and a Hamiltonian path of K*_(n-1) with exactly one arc in each
#   of them (a rainbow path). Insert the new vertex into each of these arcs, so that a -> b becomes a -> new -> b. The
#   removed arcs, which are the path, and the new vertex's arcs from its end and to its start form one more cycle.
# - even n above 32, where the search for the path takes long: insert it into the first arc of each row: n-2 cycles.
# - n = 4, 6: there is no decomposition; the largest sets have 2 and 4 cycles. The tests prove both by trying all sets.
_SMALL: dict[int, tuple[Vertices, ...]] = {
    1: (),
    2: ((0, 1),),
    4: ((0, 1, 2, 3), (0, 3, 2, 1)),
    6: ((0, 1, 2, 3, 4, 5), (0, 2, 1, 3, 5, 4), (0, 4, 1, 5, 3, 2), (0, 5, 2, 4, 3, 1)),
}
_SEARCHED = 32  # for more vertices, the search takes from seconds to hours


@lru_cache(maxsize=64)
def hamiltonian_cycles(n: int) -> tuple[Vertices, ...]:
    """Return edge-disjoint directed Hamiltonian cycles of K*_n: n-1, but 2 for n=4, 4 for n=6, n-2 for even n > 32.

    Each cycle is a sequence of all vertices 0..n-1; its last is followed by its first. n=1 has none.
    """
    if n in _SMALL:
        return _SMALL[n]
    if n % 2:
        return tuple((*row, n - 1) for row in row_complete_latin_square(n - 1))
    if n > _SEARCHED:
        return tuple((first, n - 1, *rest, n - 2) for first, *rest in row_complete_latin_square(n - 2))
    cycles = hamiltonian_cycles(n - 1)
    path = rainbow_path(cycles)
    removed = set(pairwise(path))
    return (*(_insert(n - 1, cycle, removed) for cycle in cycles), (*path, n - 1))


def _insert(new: int, cycle: Vertices, arcs: set[tuple[int, int]]) -> Vertices:
    """Insert `new` into the one arc of `cycle` that is in `arcs`."""
    at = next(i for i, b in enumerate(cycle) if (cycle[i - 1], b) in arcs)
    return (*cycle[:at], new, *cycle[at:])


@lru_cache(maxsize=64)
def hamiltonian_paths(m: int) -> tuple[Vertices, ...]:
    """Return edge-disjoint directed Hamiltonian paths of K*_m; each vertex starts at most one and ends at most one.

    There are m, using every arc, each vertex starting and ending exactly one, for every m but 3 and 5 (2 and 4 paths,
    the largest possible numbers) and odd m > 31 (m-1 paths). Even m: the rows of a row-complete Latin square (TASP
    section 3.1.3). Odd m: the cycles of K*_(m+1) without its last vertex. Closing paths through one more vertex turns
    such sets into sets of cycles and back, so the two largest sizes are the same.
    """
    if m % 2 == 0:
        return row_complete_latin_square(m)
    cycles = hamiltonian_cycles(m + 1)
    cut = [cycle.index(m) for cycle in cycles]
    return tuple((*cycle[at + 1 :], *cycle[:at]) for cycle, at in zip(cycles, cut, strict=True))


@lru_cache(maxsize=64)
def row_complete_latin_square(m: int) -> tuple[Vertices, ...]:
    """Return a Latin square of order m (even, or 1) in which every ordered pair of symbols is adjacent in one row.

    Row k is the zigzag 0, 1, -1, 2, -2, … modulo m, shifted by k. For even m the steps of the zigzag are all the
    differences 1..m-1, each once, so the m shifts of each step are different, too (Williams 1949). TASP section 3.1.3
    reads the rows as Hamiltonian paths of K*_m. Every vertex starts one path and ends one.
    """
    zigzag = [(i + 1) // 2 % m if i % 2 else -(i // 2) % m for i in range(m)]
    return tuple(tuple((k + step) % m for step in zigzag) for k in range(m))


def rainbow_path(cycles: Sequence[Sequence[int]]) -> Vertices:
    """Return a Hamiltonian path with exactly one arc in each of the n-1 `cycles`, which must decompose K*_n.

    The search goes on with the vertex that has fewest ways to leave it, and turns back where there is none. Raises
    StopIteration: there is no such path (n = 3 and 5).
    """
    number = {arc: i for i, cycle in enumerate(cycles) for arc in pairwise((*cycle, cycle[0]))}

    def paths(path: Vertices, left: frozenset[int], unused: frozenset[int]) -> Iterator[Vertices]:
        if not left:
            yield path
        ways = []
        for vertex in left:
            if (cycle := number[path[-1], vertex]) in unused:
                rest = left - {vertex}, unused - {cycle}
                onward = sum(number[vertex, other] in rest[1] for other in rest[0])
                ways.append((onward, vertex, rest))
        for _, vertex, rest in sorted(ways, key=lambda way: way[:2]):
            yield from paths((*path, vertex), *rest)

    n = len(cycles[0])
    return next(paths((0,), frozenset(range(1, n)), frozenset(range(n - 1))))
