"""Decompositions of the complete digraph K*_n (an arc in each direction between any two vertices).

K*_n decomposes into n-1 edge-disjoint directed Hamiltonian cycles for every n except 4 and 6 (Tillson 1980; TASP
section 3.1.2 uses the cycles as rings of links that do not disturb each other). There are three constructions:

- odd n: the rows of a row-complete Latin square of order n-1, each closed through one more vertex. Every arc between
  old vertices is in one row; every old vertex ends one row and starts one.
- even n >= 8: take the n-2 cycles of K*_(n-1) and a Hamiltonian path of K*_(n-1) with exactly one arc in each of them
  (a rainbow path). Insert the new vertex into each of these arcs, so that a -> b becomes a -> new -> b. The removed
  arcs, which are the path, and the new vertex's arcs from the path's end and to its start form one more cycle.
- n = 4, 6: there is no decomposition; the largest sets have 2 and 4 cycles. The tests prove both by trying all sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from random import Random

Vertices = tuple[int, ...]

_SMALL: dict[int, tuple[Vertices, ...]] = {
    1: (),
    2: ((0, 1),),
    4: ((0, 1, 2, 3), (0, 3, 2, 1)),
    6: ((0, 1, 2, 3, 4, 5), (0, 2, 1, 3, 5, 4), (0, 4, 1, 5, 3, 2), (0, 5, 2, 4, 3, 1)),
}


@lru_cache(maxsize=64)
def hamiltonian_cycles(n: int) -> tuple[Vertices, ...]:
    """Return the largest set of edge-disjoint directed Hamiltonian cycles of K*_n: n-1, but 2 for n=4 and 4 for n=6.

    Each cycle is a sequence of all vertices 0..n-1; its last is followed by its first. n=1 has none. Even n require a
    search: at most 0.2 s each up to 64, about a second at 128, many seconds at 256.

    Raises:
        ValueError: n < 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: expected at least 1 vertex. Give the number of ranks.")
    if n in _SMALL:
        return _SMALL[n]
    if n % 2:
        return tuple((*row, n - 1) for row in row_complete_latin_square(n - 1))
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
    the largest possible numbers). Even m: the rows of a row-complete Latin square (TASP section 3.1.3). Odd m: the
    cycles of K*_(m+1) without its last vertex. Closing paths through one more vertex turns such sets into sets of
    cycles and back, so the two largest sizes are the same.

    Raises:
        ValueError: m < 1.
    """
    if m < 1:
        raise ValueError(f"m={m}: expected at least 1 vertex. Give the number of ranks of a node.")
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
    reads the rows as Hamiltonian paths of K*_m. Every column holds each symbol once, also the first and the last: every
    vertex starts exactly one path and ends exactly one.

    Odd orders: there is none of order 3 and 5 (it would cut K*_4 or K*_6 into Hamiltonian cycles); none is known of
    other prime orders. Squares of composite order exist (Higham 1998) but not from cyclic groups; none is built here,
    because `hamiltonian_paths` gives rings all they need for every odd order from 7 on.
    """
    zigzag = [(i + 1) // 2 % m if i % 2 else -(i // 2) % m for i in range(m)]
    return tuple(tuple((k + step) % m for step in zigzag) for k in range(m))


_RANDOM_ROTATION = 0.2  # the probability that a step rotates the path instead of taking the best exchange


def rainbow_path(cycles: Sequence[Sequence[int]]) -> Vertices:
    """Return a Hamiltonian path with exactly one arc in each of the n-1 `cycles`, which must decompose K*_n.

    The colour of an arc is the number of its cycle. A local search starts from any path and exchanges two neighbouring
    pieces so that an arc of a missing colour enters and the fewest colours are missing afterwards; occasional random
    rotations prevent endless loops. About n²/4 exchanges bring in a given colour. If colours were random, about one in
    n²/6 exchanges would complete a path that lacks one colour only, so few steps are needed. The search is
    reproducible: it uses only `random()` of the generator, whose sequence Python guarantees for a seed.

    Does not return if there is no such path (n = 3 and 5).
    """
    n = len(cycles[0])
    after = [[0] * n for _ in cycles]  # after[c][v]: the vertex that follows v in cycle c
    colour = [[-1] * n for _ in range(n)]
    for c, cycle in enumerate(cycles):
        for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            after[c][a] = b
            colour[a][b] = c
    random = Random(n).random
    path = list(range(n))
    while True:
        arcs = [colour[a][b] for a, b in pairwise(path)]
        missing = sorted({*range(n - 1)}.difference(arcs))
        if not missing:
            return tuple(path)
        wanted = missing[int(random() * len(missing))]
        left, cuts = _best_exchange(path, colour, after[wanted], wanted, random)
        if left and (cuts is None or random() < _RANDOM_ROTATION):
            k = 1 + int(random() * (n - 1))
            path = path[k:] + path[:k]
        elif cuts is not None:
            i, j, k = cuts
            path = path[:i] + path[j:k] + path[i:j] + path[k:]


def _best_exchange(
    path: list[int], colour: list[list[int]], after: list[int], wanted: int, random: Callable[[], float]
) -> tuple[int, tuple[int, int, int] | None]:
    """Return the fewest missing colours after an exchange of path[i:j] with path[j:k], and its cuts (i, j, k).

    The exchange makes path[i-1] -> path[j] an arc of colour `wanted`. Of equally good exchanges one is random.

    Args:
        after: the vertex that follows each vertex in the cycle of colour `wanted`.
    """
    n = len(path)
    arcs = [colour[a][b] for a, b in pairwise(path)]
    count = [0] * (n - 1)
    for c in arcs:
        count[c] += 1
    missing_now = count.count(0)
    position = {vertex: i for i, vertex in enumerate(path)}
    best, cuts, ties = n, None, 0
    for i in range(1, n):
        j = position[after[path[i - 1]]]
        for k in range(j + 1, n + 1) if j > i else ():
            joint = colour[path[k - 1]][path[i]]
            removed = (arcs[i - 1], arcs[j - 1]) if k == n else (arcs[i - 1], arcs[j - 1], arcs[k - 1])
            if count[joint] and joint not in removed:
                continue  # adds a colour that the path has already: never among the best
            added = (wanted, joint) if k == n else (wanted, joint, colour[path[j - 1]][path[k]])
            missing = missing_now
            for c in {*removed, *added}:
                missing += (count[c] - removed.count(c) + added.count(c) == 0) - (count[c] == 0)
            ties = 1 if missing < best else ties + (missing == best)
            if missing < best or (missing == best and random() * ties < 1):
                best, cuts = missing, (i, j, k)
            if missing == 0:
                return best, cuts
    return best, cuts
