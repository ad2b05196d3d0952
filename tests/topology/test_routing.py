"""Routing tables: literal, inverse to each other, and what following the messages step by step gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.topology import (
    Routing,
    hamiltonian_cycles,
    held,
    holder,
    multi_node_rings,
    predecessors,
    successors,
)

rings = st.integers(1, 12).flatmap(lambda n: st.permutations(range(n))).map(tuple)


def test_a_ring_of_four():
    ring = (0, 2, 3, 1)
    assert successors(ring) == (2, 0, 3, 1)
    assert predecessors(ring) == (1, 3, 0, 2)
    assert [held(ring, 3, step) for step in range(5)] == [3, 2, 0, 1, 3]
    assert [holder(ring, 3, step) for step in range(5)] == [3, 1, 0, 2, 3]


@given(rings)
def test_tables_are_inverse_and_follow_the_messages(ring):
    n = len(ring)
    after, before = successors(ring), predecessors(ring)
    assert [before[after[rank]] for rank in range(n)] == list(range(n))
    blocks = list(range(n))
    for step in range(2 * n + 1):
        assert [held(ring, rank, step) for rank in range(n)] == blocks
        assert all(holder(ring, home, step) == blocks.index(home) for home in range(n))
        blocks = [blocks[before[rank]] for rank in range(n)]
    assert all({held(ring, rank, step) for step in range(n)} == set(range(n)) for rank in range(n))


def test_the_table_of_one_all_to_all():
    routing = Routing(hamiltonian_cycles(8))
    for a in range(8):  # every other rank gets exactly one of the seven blocks
        assert sorted(routing.ring_of[a]) == [-1, *range(7)] and routing.ring_of[a][a] == -1
    for i, ring in enumerate(routing.rings):
        assert all(routing.ring_of[a][b] == i for a, b in zip(ring, (*ring[1:], ring[0]), strict=True))


def test_tables_of_several_rings():
    routing = Routing(multi_node_rings(2, 2))
    assert routing.n == 4
    assert routing.successors == ((1, 2, 3, 0), (3, 0, 1, 2))
    assert routing.predecessors == ((3, 0, 1, 2), (1, 2, 3, 0))
    assert routing.arcs([0, 3]) == ((0, 0, 1), (0, 3, 0), (1, 0, 3), (1, 3, 2))
    assert len(routing.arcs()) == 8
    assert [routing.held(1, 0, step) for step in range(4)] == [0, 1, 2, 3]


def test_a_rank_alone_sends_nothing():
    assert Routing(((0,),)).arcs() == ()


def test_what_are_no_rings():
    with pytest.raises(ValueError, match=r"expected every rank 0\.\.2 once"):
        successors((0, 2, 2))
    with pytest.raises(ValueError, match="over the same ranks"):
        Routing(((0, 1), (0, 1, 2)))
    with pytest.raises(ValueError, match="expected one or more rings"):
        Routing(())
    with pytest.raises(ValueError, match="rings 0 and 1: expected no common arc, both have 0 -> 1"):
        _ = Routing(((0, 1, 2, 3), (3, 2, 0, 1))).ring_of
