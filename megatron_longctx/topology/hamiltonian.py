"""The complete digraph K*_n (an arc each way between any two vertices) cut into Hamiltonian cycles and paths.

It decomposes into n-1 edge-disjoint directed Hamiltonian cycles for every n except 4 and 6 (Tillson 1980; TASP section
3.1.2 uses the cycles as rings of links that do not disturb each other). Three constructions:

- odd n: the rows of a row-complete Latin square of order n-1, each closed through one more vertex. Every arc between
  old vertices is in one row; every old vertex ends one row and starts one.
- even n >= 8: take the n-2 cycles of K*_(n-1) and a Hamiltonian path of K*_(n-1) with exactly one arc in each of them
  (`rainbow`). Put the new vertex into each of these arcs, a -> b becoming a -> new -> b. What remains are the arcs
  taken out, which are the path, and the new vertex's arcs from the path's end and to its start: one more cycle.
- n = 4, 6: there is no decomposition; the largest sets have 2 and 4 cycles. The tests prove both by trying all sets.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from .latin import row_complete_latin_square
from .rainbow import rainbow_path

Vertices = tuple[int, ...]

_LARGEST: dict[int, tuple[Vertices, ...]] = {
    4: ((0, 1, 2, 3), (0, 3, 2, 1)),
    6: ((0, 1, 2, 3, 4, 5), (0, 2, 1, 3, 5, 4), (0, 4, 1, 5, 3, 2), (0, 5, 2, 4, 3, 1)),
}


@lru_cache(maxsize=64)
def hamiltonian_cycles(n: int) -> tuple[Vertices, ...]:
    """The largest set of edge-disjoint directed Hamiltonian cycles of K*_n: n-1 of them, but 2 for n=4 and 4 for n=6.

    Each cycle is a sequence of all vertices 0..n-1; its last is followed by its first. n=1 has none. Even n take a
    search: at most 0.2 s each up to 64, about a second at 128, many seconds at 256.

    Raises:
        ValueError: n < 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: expected at least 1 vertex. Give the number of ranks.")
    if n == 1:
        return ()
    if n == 2:
        return ((0, 1),)
    if n in _LARGEST:
        return _LARGEST[n]
    if n % 2:
        return tuple((*row, n - 1) for row in row_complete_latin_square(n - 1))
    cycles = hamiltonian_cycles(n - 1)
    path = rainbow_path(cycles)
    taken = set(pairwise(path))
    return (*(_insert(n - 1, cycle, taken) for cycle in cycles), (*path, n - 1))


def _insert(new: int, cycle: Vertices, taken: set[tuple[int, int]]) -> Vertices:
    """`cycle` with `new` put into its one arc that is in `taken`."""
    at = next(i for i, b in enumerate(cycle) if (cycle[i - 1], b) in taken)
    return (*cycle[:at], new, *cycle[at:])


@lru_cache(maxsize=64)
def hamiltonian_paths(m: int) -> tuple[Vertices, ...]:
    """Edge-disjoint directed Hamiltonian paths of K*_m, each vertex starting at most one and ending at most one.

    There are m, using every arc, each vertex starting and ending exactly one, for every m but 3 and 5 (2 and 4 paths,
    the most there are). Even m: the rows of a row-complete Latin square (TASP section 3.1.3). Odd m: the cycles of
    K*_(m+1) without its last vertex. Closing paths through one more vertex turns such sets into sets of cycles and
    back, so the two largest sizes are the same.

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
