"""Hamiltonian cycles and paths of complete digraphs, row-complete Latin squares, and rings over several nodes."""

from itertools import pairwise, permutations

import pytest

from megatron_longctx.config.tasp import (
    hamiltonian_cycles,
    hamiltonian_paths,
    multi_node_rings,
    row_complete_latin_square,
)

SIZES = [*(n for n in range(1, 67) if n not in (4, 6)), 97, 100]
LARGEST = {4: 2, 6: 4}


def cycle_arcs(cycle):
    return list(pairwise((*cycle, cycle[0])))


def assert_disjoint_cycles(cycles, n):
    for cycle in cycles:
        assert sorted(cycle) == list(range(n))
    arcs = [arc for cycle in cycles for arc in cycle_arcs(cycle)]
    assert len(set(arcs)) == len(arcs) == n * len(cycles)


def assert_disjoint_paths(paths, m):
    """Check Hamiltonian paths without a common arc, start or end."""
    for path in paths:
        assert sorted(path) == list(range(m))
    arcs = [arc for path in paths for arc in pairwise(path)]
    assert len(set(arcs)) == len(arcs) == (m - 1) * len(paths)
    assert len({path[0] for path in paths}) == len({path[-1] for path in paths}) == len(paths)


def largest_set_of_cycles(n):
    """Return the number of cycles in the largest edge-disjoint set in K*_n, by trying all sets."""
    arcs = [frozenset(cycle_arcs((0, *rest))) for rest in permutations(range(1, n))]

    def most(candidates):
        return max(
            (1 + most([b for b in candidates[i + 1 :] if not a & b]) for i, a in enumerate(candidates)), default=0
        )

    return most(arcs)


@pytest.mark.parametrize("n", SIZES)
def test_cycles_use_every_arc_once(n):
    cycles = hamiltonian_cycles(n)
    assert len(cycles) == (n - 2 if n % 2 == 0 and n > 32 else n - 1)
    assert_disjoint_cycles(cycles, n)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_no_larger_set_exists_for_4_and_6(n):
    """Try all sets of cycles, which proves the sizes that `hamiltonian` states for 4 and 6 and checks the trial."""
    largest = largest_set_of_cycles(n)
    assert largest == LARGEST.get(n, n - 1)
    assert len(hamiltonian_cycles(n)) == largest
    assert_disjoint_cycles(hamiltonian_cycles(n), n)


@pytest.mark.parametrize("m", [m for m in range(1, 66) if m not in (3, 5)])
def test_paths_use_every_arc_and_every_end_once(m):
    paths = hamiltonian_paths(m)
    assert len(paths) == (m - 1 if m % 2 and m > 31 else m)  # all arcs, starts and ends, if m: they are disjoint
    assert_disjoint_paths(paths, m)


@pytest.mark.parametrize("m", [3, 5])
def test_fewer_paths_where_no_more_exist(m):
    """Paths with different starts and ends close, through one more vertex, to equally many disjoint cycles."""
    paths = hamiltonian_paths(m)
    assert len(paths) == LARGEST[m + 1] == largest_set_of_cycles(m + 1)
    assert_disjoint_paths(paths, m)
    assert_disjoint_cycles([(*path, m) for path in paths], m + 1)


@pytest.mark.parametrize("m", [1, *range(2, 66, 2)])
def test_squares_are_latin_and_row_complete(m):
    square = row_complete_latin_square(m)
    symbols = list(range(m))
    assert all(sorted(row) == symbols for row in square)
    assert all(sorted(column) == symbols for column in zip(*square, strict=True))
    neighbours = [pair for row in square for pair in pairwise(row)]
    assert sorted(neighbours) == sorted(permutations(symbols, 2))


@pytest.mark.parametrize("u", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_rings_over_nodes(m, u):
    rings = multi_node_rings(m, u)
    n = m * u
    if n > 1:
        assert_disjoint_cycles(rings, n)
    if u == 1:
        assert rings == (hamiltonian_cycles(m) or ((0,),))
        return
    assert len(rings) == LARGEST.get(m + 1, m)
    between = [(a, b) for ring in rings for a, b in cycle_arcs(ring) if a // m != b // m]
    # Every ring crosses once from each node to the next; every rank's NIC carries one message out and one in.
    assert sorted(a // m for a, _ in between) == sorted(list(range(u)) * len(rings))
    assert all(b // m == (a // m + 1) % u for a, b in between)
    for ends in ([a for a, _ in between], [b for _, b in between]):
        assert len(set(ends)) == len(ends)
    if len(rings) == m:
        assert sorted(a for a, _ in between) == sorted(b for _, b in between) == list(range(n))
        inside = {(a, b) for ring in rings for a, b in cycle_arcs(ring) if a // m == b // m}
        assert inside == {(a, b) for a, b in permutations(range(n), 2) if a // m == b // m}
