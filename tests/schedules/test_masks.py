"""Masks against their definition, pair by pair; and the arithmetic of slices and bands."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_longctx.layout import Layout, build_layout
from megatron_longctx.schedules import Block, Kind, Mask, Slice
from megatron_longctx.schedules.mask import FAR, band_between, causal, documents, full, joined
from megatron_longctx.schedules.visibility import Visibility, runs
from tests.schedules.masks import Arguments, arguments, dense, pairs_of, shown

SIZE = 12
"""Rows and columns that slices of these tests lie in."""
thorough = settings(max_examples=300, deadline=None)


@thorough
@given(arguments())
@example({"lengths": [1] * 60})
@example({"lengths": [5, 1, 58], "window": (3, None)})
@example({"lengths": [9], "window": (2, 0), "prefixes": [4]})
@example({"lengths": [6, 3], "causal": False, "window": (1, 2), "parents": [-1, 0]})
def test_masks_show_what_their_arguments_say(said: Arguments) -> None:
    mask = documents(**said)
    seen = dense(said)
    np.testing.assert_array_equal(shown(mask), seen)
    assert mask.pairs == seen.sum() and mask.length == sum(said["lengths"])
    assert all(each == each.tight() for each in mask.slices)
    assert [each.q_start for each in mask.slices] == sorted(each.q_start for each in mask.slices)
    starts = np.cumsum([0, *said["lengths"]])
    assert [(each.start, each.stop) for each in mask.documents] == list(pairwise(starts))


def test_positions_go_on_where_a_parent_ends() -> None:
    tree = documents([5, 3, 4, 2], parents=[-1, 0, 0, 1])
    assert [each.position for each in tree.documents] == [0, 5, 5, 8]


def test_causal_and_full_are_one_document() -> None:
    assert causal(9) == documents([9]) and full(9) == documents([9], causal=False)
    assert causal(9).slices == (Slice(0, 9, 0, 9, -FAR, 0),) and full(9).slices == (Slice(0, 9, 0, 9),)
    assert causal(0).slices == full(0).slices == () and causal(0).pairs == 0
    assert causal(2**20).pairs == 2**19 * (2**20 + 1)


def test_names_and_windows() -> None:
    assert str(causal(3)) == "causal" and str(full(3)) == "full"
    mixed = documents([2, 3], window=(1, 0), prefixes=[0, 1], parents=[-1, 0])
    assert str(mixed) == "causal, 2 documents, window 1, 0, prefixes, a tree"
    for said, has in (
        ({}, False), ({"causal": False}, False), ({"prefixes": [3, 2]}, False), ({"parents": [-1, 0]}, False),
        ({"window": (2, 0)}, True), ({"window": (1000, 0)}, False), ({"causal": False, "window": (None, 2)}, True),
    ):  # fmt: skip
        assert documents([9, 4], **said).has_windows is has, said


def test_masks_are_told_apart_by_what_they_show() -> None:
    """Plans are kept by mask."""
    first, again, other = documents([4, 4]), documents([4, 4]), documents([4, 4], window=(1, 0))
    assert first == again and hash(first) == hash(again) and first != other and hash(first) != hash(other)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"lengths": [3, 0]}, r"documents\[1\]=0: expected 1 token or more. Leave empty documents out"),
        ({"lengths": [3], "window": (-1, None)}, r"window=\(-1, None\): expected numbers of tokens from 0 on, or None"),
        ({"lengths": [3], "window": (None, -2)}, r"window=\(None, -2\)"),
        ({"lengths": [3, 2], "prefixes": [3]}, r"prefixes=1 numbers: expected 2, one for each document"),
        ({"lengths": [3, 2], "prefixes": [0, 3]}, r"prefixes\[1\]=3: expected 0 to 2"),
        ({"lengths": [3, 2], "prefixes": [-1, 0]}, r"prefixes\[0\]=-1: expected 0 to 3"),
        ({"lengths": [3], "prefixes": [1], "causal": False}, r"prefixes=given: expected none with causal=False"),
        ({"lengths": [3, 2], "parents": [-1]}, r"parents=1 numbers: expected 2"),
        ({"lengths": [3, 2], "parents": [-1, 1]}, r"parents\[1\]=1: expected -1 to 0"),
        ({"lengths": [3, 2], "parents": [0, -2]}, r"parents\[0\]=0: expected -1 to -1"),
    ],
)
def test_arguments_that_make_no_mask_are_refused(said: Arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documents(**said)


places = st.integers(0, SIZE)
edges = st.one_of(st.just(FAR), st.integers(-SIZE, SIZE))
slices = st.builds(
    lambda q, k, lo, hi: Slice(min(q), max(q), min(k), max(k), -FAR if lo == FAR else lo, hi),
    st.tuples(places, places), st.tuples(places, places), edges, edges,
)  # fmt: skip


def of(*some: Slice | None) -> np.ndarray:
    return pairs_of([each for each in some if each is not None], SIZE, SIZE)


@thorough
@given(slices, slices, st.tuples(places, places), st.tuples(places, places))
def test_slices_are_counted_cut_and_moved(one: Slice, two: Slice, q: tuple[int, int], k: tuple[int, int]) -> None:
    pairs = of(one)
    small = one.tight()
    np.testing.assert_array_equal(of(small), pairs)
    assert (small is None) == (not pairs.any())
    assert all(one.sees(i, j) == bool(pairs[i, j]) for i in range(SIZE) for j in range(SIZE))
    if small is not None:
        rows, columns = np.nonzero(pairs)
        assert small[:4] == (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1)
        assert small.pairs == pairs.sum() and small.tight() == small
        assert small.is_full == (small.pairs == small.num_queries * small.num_keys)
        assert [of(small._replace(**{name: far}))[small.q_start : small.q_stop].sum() > small.pairs
                for name, far in (("lo", -FAR), ("hi", FAR))] == [small.lo != -FAR, small.hi != FAR]  # fmt: skip
        moved = small.moved(3, 5)
        assert moved.pairs == small.pairs and moved.moved(-3, -5) == small
        np.testing.assert_array_equal(pairs_of([moved], SIZE + 5, SIZE + 5)[3 : 3 + SIZE, 5:], pairs)
    inside = of(Slice(min(q), max(q), min(k), max(k)))
    cut, common = one.cut(min(q), max(q), min(k), max(k)), one.overlap(two)
    np.testing.assert_array_equal(of(cut), pairs * inside)
    np.testing.assert_array_equal(of(common), pairs * of(two))
    assert all(each is None or each == each.tight() for each in (cut, common))


def test_slices_in_words() -> None:
    assert str(Slice(0, 4, 2, 6)) == "[0:4] x [2:6]"
    assert str(Slice(0, 4, 2, 6, -1, 3)) == "[0:4] x [2:6] where -1 <= j - i and j - i <= 3"


def pieces(mask: Mask, q_cuts: list[int], k_cuts: list[int]) -> list[Slice]:
    ends = [sorted({0, mask.length, *(cut % (mask.length + 1) for cut in cuts)}) for cuts in (q_cuts, k_cuts)]
    cells = [(*q, *k) for q in pairwise(ends[0]) for k in pairwise(ends[1])]
    return [found for each in mask.slices for cell in cells if (found := each.cut(*cell)) is not None]


cuts = st.lists(st.integers(0, 40), max_size=4)


@thorough
@given(arguments(30), cuts, cuts, st.randoms())
def test_joined_slices_show_the_same(said: Arguments, q: list[int], k: list[int], shuffled: random.Random) -> None:
    mask = documents(**said)
    cut = pieces(mask, q, k)
    np.testing.assert_array_equal(pairs_of(joined(cut), mask.length, mask.length), shown(mask))
    shuffled.shuffle(cut)
    found = joined(cut)
    assert len(found) <= len(cut)
    np.testing.assert_array_equal(pairs_of(found, mask.length, mask.length), shown(mask))


@given(st.sampled_from([causal(40), full(40)]), cuts, cuts)
@example(causal(40), [], [1, 2])  # queries that join late
def test_cuts_are_undone(mask: Mask, q: list[int], k: list[int]) -> None:
    """As a rank's spans cut its queries, and other ranks' spans the keys that these see."""
    assert joined(pieces(mask, [*q, *k], k)) == list(mask.slices)


ranges = st.builds(
    lambda start, count, step: range(start, start + count * step, step),
    st.integers(0, 9), st.integers(0, 9), st.integers(1, 4),
)  # fmt: skip


@thorough
@given(slices, ranges, ranges)
def test_bands_between_evenly_spaced_tokens(each: Slice, queries: range, keys: range) -> None:
    wanted = [[each.sees(i, j) for j in keys] for i in queries]
    found = list(band_between(each, queries, keys)) if each.tight() else []
    shape = len(queries), len(keys)
    np.testing.assert_array_equal(pairs_of(found, *shape), np.array(wanted, dtype=int).reshape(shape))
    assert queries.step != keys.step or len(found) <= 1


@st.composite
def layouts(draw: st.DrawFn, length: int) -> Layout:
    """Those of the modes, and pieces that are dealt in turn."""
    n = draw(st.integers(1, 5))
    name = draw(st.sampled_from(["contiguous", "zigzag", "striped", "dealt"]))
    if name != "dealt":
        return build_layout(name, n, length)
    size = draw(st.integers(1, 5))
    spans = [range(at, min(at + size, length)) for at in range(0, length, size)]
    return Layout("dealt", length, tuple(tuple(spans[rank::n]) for rank in range(n)))


@settings(max_examples=150, deadline=None)
@given(arguments(40), st.data())
def test_what_ranks_see_of_each_other(said: Arguments, data: st.DataObject) -> None:
    mask, seen = documents(**said), dense(said)
    queries, keys = (data.draw(layouts(mask.length)) for _ in range(2))
    found = Visibility(mask, queries, keys)
    for q_rank in range(queries.n):
        mine = seen[list(queries.tokens(q_rank))]
        for k_rank in range(keys.n):
            wanted = mine[:, list(keys.tokens(k_rank))]
            np.testing.assert_array_equal(pairs_of(found.between(q_rank, k_rank), *wanted.shape), wanted)
            columns = np.nonzero(wanted.any(axis=0))[0]
            needed = found.needed(q_rank, k_rank)
            assert [slot for block in needed for slot in range(block.start, block.stop)] == list(columns)
            whole = Block(Kind.KV, k_rank, 0, wanted.shape[1])
            rows = np.nonzero(wanted.any(axis=1))[0]
            assert found.first_query(q_rank, whole) == (rows[0] if len(rows) else wanted.shape[0])
            for call in found.attend_all(q_rank, k_rank):
                (query,) = call.queries
                assert (query.start, query.stop) == (rows[0], rows[-1] + 1) and list(call.keys) == needed
                part = wanted[query.start : query.stop][:, columns]
                np.testing.assert_array_equal(pairs_of(call.slices, *part.shape), part)
            assert bool(found.attend_all(q_rank, k_rank)) == bool(wanted.any())


@given(st.lists(st.tuples(places, places).map(lambda pair: (min(pair), max(pair) + 1)), max_size=8))
def test_runs_are_what_spans_cover(spans: list[tuple[int, int]]) -> None:
    found = runs(spans)
    assert [x for a, b in found for x in range(a, b)] == sorted({x for a, b in spans for x in range(a, b)})
    assert all(a[1] < b[0] for a, b in pairwise(found))
