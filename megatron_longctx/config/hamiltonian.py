"""Decompositions of the complete digraph K*_n (an arc in each direction between any two vertices).

K*_n decomposes into n-1 edge-disjoint directed Hamiltonian cycles for every n except 4 and 6 (Tillson 1980; TASP
section 3.1.2 uses the cycles as rings of links that do not disturb each other). The constructions:

- odd n: the rows of a row-complete Latin square of order n-1, each closed through one more vertex. Every arc between
  old vertices is in one row; every old vertex ends one row and starts one.
- even n from 8 to 32: take the n-2 cycles of K*_(n-1) and a Hamiltonian path of K*_(n-1) with exactly one arc in each
  of them (a rainbow path). Insert the new vertex into each of these arcs, so that a -> b becomes a -> new -> b. The
  removed arcs, which are the path, and the new vertex's arcs from the path's end and to its start form one more cycle.
- even n above 32, where the search for the path takes long: insert it into the first arc of each row, for n-2 cycles.
- n = 4, 6: there is no decomposition; the largest sets have 2 and 4 cycles. The tests prove both by trying all sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

Vertices = tuple[int, ...]

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

    Raises:
        ValueError: n < 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: expected at least 1 vertex. Give the number of ranks.")
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
    reads the rows as Hamiltonian paths of K*_m. Every vertex starts one path and ends one.
    """
    zigzag = [(i + 1) // 2 % m if i % 2 else -(i // 2) % m for i in range(m)]
    return tuple(tuple((k + step) % m for step in zigzag) for k in range(m))


def rainbow_path(cycles: Sequence[Sequence[int]]) -> Vertices:
    """Return a Hamiltonian path with exactly one arc in each of the n-1 `cycles`, which must decompose K*_n.

    The search goes on with the vertex that has fewest ways to leave it, and turns back where there is none.

    Raises:
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
