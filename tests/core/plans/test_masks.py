"""Masks against their definition, pair by pair; the arithmetic of slices and bands; visibility between ranks."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_longctx.core.layout import Layout, build_layout
from megatron_longctx.core.plans import Block, Kind, Mask, Slice
from megatron_longctx.core.plans.mask import causal, documents, full
from megatron_longctx.core.plans.slices import FAR, band_between, joined, merge_spans
from megatron_longctx.core.plans.visibility import Visibility
from megatron_longctx.testing.references import visible
from tests.core.plans.masks import Arguments, arguments, pairs_of

SIZE = 12
"""Rows and columns of the slices of these tests."""
thorough = settings(max_examples=300, deadline=None)


def shown(mask: Mask) -> np.ndarray:
    """Return the pairs of a mask's slices; no pair is in two."""
    count = pairs_of(mask.slices, mask.length, mask.length)
    assert count.max(initial=0) <= 1
    return count.astype(bool)


@thorough
@given(arguments())
@example({"lengths": [1] * 60})
@example({"lengths": [5, 1, 58], "window": (3, None)})
@example({"lengths": [9], "window": (2, 0), "prefixes": [4]})
@example({"lengths": [6, 3], "causal": False, "window": (1, 2), "parents": [-1, 0]})
def test_masks_show_the_pairs_of_their_definition(drawn: Arguments) -> None:
    mask = documents(**drawn)
    seen = visible(**drawn).numpy()
    np.testing.assert_array_equal(shown(mask), seen)
    assert mask.pairs == seen.sum() and mask.length == sum(drawn["lengths"])
    assert all(each == each.tight() for each in mask.slices)
    assert [each.q_start for each in mask.slices] == sorted(each.q_start for each in mask.slices)
    starts = np.cumsum([0, *drawn["lengths"]])
    assert [(each.start, each.stop) for each in mask.documents] == list(pairwise(starts))


def test_positions_continue_after_a_parent() -> None:
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
    for options, has in (
        ({}, False), ({"causal": False}, False), ({"prefixes": [3, 2]}, False), ({"parents": [-1, 0]}, False),
        ({"window": (2, 0)}, True), ({"window": (1000, 0)}, False), ({"causal": False, "window": (None, 2)}, True),
    ):  # fmt: skip
        assert documents([9, 4], **options).has_windows is has, options


def test_masks_are_equal_if_they_show_the_same() -> None:
    """Plans are cached by mask."""
    first, again, other = documents([4, 4]), documents([4, 4]), documents([4, 4], window=(1, 0))
    assert first == again and hash(first) == hash(again) and first != other and hash(first) != hash(other)


@pytest.mark.parametrize(
    ("wrong", "message"),
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
def test_wrong_arguments_are_refused(wrong: Arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documents(**wrong)


places = st.integers(0, SIZE)
edges = st.one_of(st.just(FAR), st.integers(-SIZE, SIZE))
slices = st.builds(
    lambda q, k, lo, hi: Slice(min(q), max(q), min(k), max(k), -FAR if lo == FAR else lo, hi),
    st.tuples(places, places), st.tuples(places, places), edges, edges,
)  # fmt: skip


def dense(each: Slice | None) -> np.ndarray:
    return pairs_of([] if each is None else [each], SIZE, SIZE)


@thorough
@given(slices, slices, st.tuples(places, places), st.tuples(places, places))
def test_slices_are_counted_cut_and_moved(one: Slice, two: Slice, q: tuple[int, int], k: tuple[int, int]) -> None:
    pairs = dense(one)
    small = one.tight()
    np.testing.assert_array_equal(dense(small), pairs)
    assert (small is None) == (not pairs.any())
    if small is not None:
        rows, columns = np.nonzero(pairs)
        assert small[:4] == (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1)
        assert small.pairs == pairs.sum() and small.tight() == small
        assert small.is_full == (small.pairs == small.num_queries * small.num_keys)
        assert [dense(small._replace(**{name: far}))[small.q_start : small.q_stop].sum() > small.pairs
                for name, far in (("lo", -FAR), ("hi", FAR))] == [small.lo != -FAR, small.hi != FAR]  # fmt: skip
        moved = small.moved(3, 5)
        assert moved.pairs == small.pairs and moved.moved(-3, -5) == small
        np.testing.assert_array_equal(pairs_of([moved], SIZE + 5, SIZE + 5)[3 : 3 + SIZE, 5:], pairs)
    inside = dense(Slice(min(q), max(q), min(k), max(k)))
    cut, common = one.cut(min(q), max(q), min(k), max(k)), one.overlap(two)
    np.testing.assert_array_equal(dense(cut), pairs * inside)
    np.testing.assert_array_equal(dense(common), pairs * dense(two))
    assert all(each is None or each == each.tight() for each in (cut, common))


def test_slices_in_words() -> None:
    assert str(Slice(0, 4, 2, 6)) == "[0:4] x [2:6]"
    assert str(Slice(0, 4, 2, 6, -1, 3)) == "[0:4] x [2:6] where -1 <= j - i and j - i <= 3"


def pieces(mask: Mask, q_cuts: list[int], k_cuts: list[int]) -> list[Slice]:
    ends = [sorted({0, mask.length, *(cut % (mask.length + 1) for cut in cuts)}) for cuts in (q_cuts, k_cuts)]
    cells = [(*q, *k) for q in pairwise(ends[0]) for k in pairwise(ends[1])]
    return [piece for each in mask.slices for cell in cells if (piece := each.cut(*cell)) is not None]


cuts = st.lists(st.integers(0, 40), max_size=4)


@thorough
@given(arguments(30), cuts, cuts, st.randoms())
def test_joined_slices_show_the_same(drawn: Arguments, q: list[int], k: list[int], shuffled: random.Random) -> None:
    mask = documents(**drawn)
    cut = pieces(mask, q, k)
    np.testing.assert_array_equal(pairs_of(joined(cut), mask.length, mask.length), shown(mask))
    shuffled.shuffle(cut)
    found = joined(cut)
    assert len(found) <= len(cut)
    np.testing.assert_array_equal(pairs_of(found, mask.length, mask.length), shown(mask))


@given(st.sampled_from([causal(40), full(40)]), cuts, cuts)
@example(causal(40), [], [1, 2])  # queries that join late
def test_joining_undoes_cuts(mask: Mask, q: list[int], k: list[int]) -> None:
    """A rank's spans cut its queries, and other ranks' spans cut the keys that these see."""
    assert joined(pieces(mask, [*q, *k], k)) == list(mask.slices)


ranges = st.builds(
    lambda start, count, step: range(start, start + count * step, step),
    st.integers(0, 9), st.integers(0, 9), st.integers(1, 4),
)  # fmt: skip


@thorough
@given(slices, ranges, ranges)
def test_bands_between_strided_tokens(each: Slice, queries: range, keys: range) -> None:
    expected = pairs_of([each], 64, 64)[np.ix_(queries, keys)]
    found = list(band_between(each, queries, keys)) if each.tight() else []
    np.testing.assert_array_equal(pairs_of(found, len(queries), len(keys)), expected)
    assert queries.step != keys.step or len(found) <= 1


@st.composite
def layouts(draw: st.DrawFn, length: int) -> Layout:
    """The layouts of modes, and pieces that are dealt in turn."""
    n = draw(st.integers(1, 5))
    name = draw(st.sampled_from(["contiguous", "zigzag", "striped", "dealt"]))
    if name != "dealt":
        return build_layout(name, n, length)
    size = draw(st.integers(1, 5))
    spans = [range(at, min(at + size, length)) for at in range(0, length, size)]
    return Layout("dealt", length, tuple(tuple(spans[rank::n]) for rank in range(n)))


@settings(max_examples=150, deadline=None)
@given(arguments(40), st.data())
def test_visibility_between_ranks(drawn: Arguments, data: st.DataObject) -> None:
    mask, seen = documents(**drawn), visible(**drawn).numpy()
    queries, keys = (data.draw(layouts(mask.length)) for _ in range(2))
    found = Visibility(mask, queries, keys)
    for q_rank in range(queries.n):
        mine = seen[list(queries.tokens(q_rank))]
        for k_rank in range(keys.n):
            expected = mine[:, list(keys.tokens(k_rank))]
            np.testing.assert_array_equal(pairs_of(found.between(q_rank, k_rank), *expected.shape), expected)
            columns = np.nonzero(expected.any(axis=0))[0]
            needed = found.needed(q_rank, k_rank)
            assert [slot for block in needed for slot in range(block.start, block.stop)] == list(columns)
            whole = Block(Kind.KV, k_rank, 0, expected.shape[1])
            rows = np.nonzero(expected.any(axis=1))[0]
            assert found.first_query(q_rank, whole) == (rows[0] if len(rows) else expected.shape[0])
            calls = found.attend(q_rank, found.all_keys[k_rank])
            for call in calls:
                (query,) = call.queries
                assert (query.start, query.stop) == (rows[0], rows[-1] + 1) and list(call.keys) == needed
                part = expected[query.start : query.stop][:, columns]
                np.testing.assert_array_equal(pairs_of(call.slices, *part.shape), part)
            assert bool(calls) == bool(expected.any())


@given(st.lists(st.tuples(places, places).map(lambda pair: (min(pair), max(pair) + 1)), max_size=8))
def test_merged_spans_cover_the_same(spans: list[tuple[int, int]]) -> None:
    found = merge_spans(spans)
    assert [x for a, b in found for x in range(a, b)] == sorted({x for a, b in spans for x in range(a, b)})
    assert all(a[1] < b[0] for a, b in pairwise(found))
