"""Token layouts: literal token lists, what holds for every layout, and the exact balance of packs."""

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_longctx.core.layout import LAYOUTS, SLACK, Layout, balanced, build_layout, contiguous, striped, zigzag

LITERAL = {  # (name, ranks, length, unit): tokens of every rank
    ("contiguous", 3, 7, 1): [[0, 1], [2, 3], [4, 5, 6]],
    ("contiguous", 4, 10, 1): [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]],
    ("contiguous", 4, 2, 1): [[], [0], [], [1]],
    ("contiguous", 2, 12, 4): [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]],
    ("zigzag", 1, 5, 1): [[0, 1, 2, 3, 4]],
    ("zigzag", 3, 12, 1): [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]],
    ("zigzag", 3, 10, 1): [[0, 8, 9], [1, 2, 6, 7], [3, 4, 5]],
    ("zigzag", 4, 3, 1): [[2], [], [0, 1], []],
    ("zigzag", 3, 0, 1): [[], [], []],
    ("zigzag", 2, 10, 2): [[0, 1, 6, 7, 8, 9], [2, 3, 4, 5]],
    ("striped", 3, 7, 1): [[0, 3, 6], [1, 4], [2, 5]],
    ("striped", 4, 2, 1): [[0], [1], [], []],
    ("striped", 2, 8, 2): [[0, 2, 4, 6], [1, 3, 5, 7]],
}


def tokens_by_rank(layout: Layout) -> list[list[int]]:
    return [list(layout.tokens(rank)) for rank in range(layout.n)]


@pytest.mark.parametrize(("name", "n", "length", "unit"), LITERAL)
def test_tokens_of_every_rank(name, n, length, unit):
    layout = build_layout(name, n, length, unit)
    assert tokens_by_rank(layout) == LITERAL[name, n, length, unit]
    assert (layout.name, layout.n, layout.length) == (name, n, length)


def test_functions_build_the_layouts_of_their_names():
    for name, function in (("contiguous", contiguous), ("zigzag", zigzag), ("striped", striped)):
        assert LAYOUTS[name] is function
        assert function(3, 10, 1) == build_layout(name, 3, 10)


def test_every_document_is_in_zigzag_over_all_ranks():
    documents = [(0, 8, 0), (8, 9, 0), (9, 13, 0)]
    held = tokens_by_rank(build_layout("per_document", 2, 13, documents=documents))
    assert held == [[0, 1, 6, 7, 8, 9, 12], [2, 3, 4, 5, 10, 11]]
    assert tokens_by_rank(build_layout("per_document", 2, 8)) == tokens_by_rank(build_layout("zigzag", 2, 8))
    with pytest.raises(ValueError, match=r"document of 1 tokens: the per_document layout .* multiple of 2"):
        build_layout("per_document", 2, 12, 2, [(0, 8, 0), (8, 9, 0), (9, 12, 0)])


ranks = st.integers(1, 12)


@given(st.sampled_from(sorted(LAYOUTS)), ranks, st.integers(0, 200))
def test_every_token_is_held_once_in_ascending_slots(name, n, length):
    layout = build_layout(name, n, length)
    held = tokens_by_rank(layout)
    assert len(held) == n
    assert sorted(token for tokens in held for token in tokens) == list(range(length))
    for rank, tokens in enumerate(held):
        assert tokens == sorted(tokens) and layout.num_tokens(rank) == len(tokens)
        spans = list(layout.slot_spans(rank))
        assert all(len(span) and tokens[start : start + len(span)] == list(span) for start, span in spans)
        assert sum(len(span) for _, span in spans) == len(tokens)


@given(st.sampled_from(["contiguous", "striped", "zigzag"]), ranks, st.integers(0, 40), st.integers(1, 8))
def test_shards_are_whole_units_and_nearly_equal(name, n, units, unit):
    length = units * unit * (n if name == "striped" and unit > 1 else 1)
    layout = build_layout(name, n, length, unit)
    sizes = [layout.num_tokens(rank) for rank in range(n)]
    assert sum(sizes) == length
    assert all(size % unit == 0 for size in sizes)
    pieces = [len(span) for spans in layout.spans for span in spans]
    assert max(pieces) - min(pieces) <= unit
    assert max(sizes) - min(sizes) <= (2 * unit if name == "zigzag" else unit)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spiral", 2, 8), "layout 'spiral': expected one of contiguous, zigzag, striped"),
        (("zigzag", 0, 8), "n=0: expected at least 1"),
        (("zigzag", -2, 8), "n=-2"),
        (("contiguous", 2, -1), "length=-1: expected 0 tokens or more"),
        (("contiguous", 2, 7, 2), "length=7: expected a multiple of unit=2"),
        (("contiguous", 2, 8, 0), "unit=0"),
        (("striped", 4, 36, 2), "length 36: .* over 4 ranks .* units of 2 needs a multiple of 8. Nearest: 32 or 40"),
        (("striped", 4, 6, 2), "needs a multiple of 8. Nearest: 8;"),
    ],
)
def test_wrong_sizes_are_refused_with_their_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_layout(*arguments)


def balanced_pack(lengths: Sequence[int], n: int, unit: int = 1) -> Layout:
    ends = list(accumulate(lengths, initial=0))
    return balanced(n, ends[-1], unit, [(stop - each, stop, 0) for each, stop in zip(lengths, ends[1:], strict=True)])


def work(layout: Layout, lengths: Sequence[int]) -> list[int]:
    """The number of keys that the tokens of each rank see in their documents."""
    position = [token for length in lengths for token in range(1, length + 1)]
    return [sum(position[token] for token in tokens) for tokens in tokens_by_rank(layout)]


def homes(layout: Layout, lengths: Sequence[int]) -> list[set[int]]:
    """For each document, the ranks that hold a part of it."""
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    holders: list[set[int]] = [set() for _ in lengths]
    for rank, tokens in enumerate(tokens_by_rank(layout)):
        for token in tokens:
            holders[document[token]].add(rank)
    return holders


packs = st.one_of(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.lists(st.integers(1, 4000), min_size=1, max_size=8),
    st.tuples(st.integers(1, 500), st.integers(1, 30)).map(lambda alike: [alike[0]] * alike[1]),
)


@given(packs, ranks, st.integers(1, 8))
@example([1], 12, 8)
@example([7, 1, 1], 3, 3)
@example([1602, 1598], 2, 8)  # whole documents would do, except for the unit
def test_tokens_and_work_are_equal_for_every_pack(lengths, n, unit):
    """Except for the slack, a unit and the rounding of cuts to tokens."""
    lengths = [*lengths, *([rest] if (rest := -sum(lengths) % unit) else [])]
    layout = balanced_pack(lengths, n, unit)
    held = tokens_by_rank(layout)
    assert sorted(token for tokens in held for token in tokens) == list(range(sum(lengths)))
    assert all(tokens == sorted(tokens) for tokens in held)
    assert all(len(span) for spans in layout.spans for span in spans)
    sizes, done = [len(tokens) for tokens in held], work(layout, lengths)
    assert all(size % unit == 0 for size in sizes)
    share = sum(sizes) / n
    assert max(abs(size - share) for size in sizes) <= 2 * SLACK * share + unit
    mean = sum(done) / n
    assert max(abs(each - mean) for each in done) <= 2 * SLACK * mean + (unit + 1) * max(lengths)


@given(st.integers(0, 2**32), st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2, 8]))
def test_real_packs_are_balanced_to_one_percent(seed, n, unit):
    """If no document has over a quarter of the tokens. Every weighting of tokens against pairs is then balanced."""
    draw, lengths, most = random.Random(seed), [], 16384
    while sum(lengths) < most:
        lengths.append(min(max(int(draw.lognormvariate(6, 1)), 16), most // 4 - 1, most - sum(lengths)))
    layout = balanced_pack(lengths, n, unit)
    done, sizes = work(layout, lengths), [layout.num_tokens(rank) for rank in range(n)]
    assert max(done) * n <= 1.015 * sum(done)
    assert max(sizes) * n <= 1.01 * sum(sizes) + n * unit


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
def test_one_document_is_balanced_as_zigzag_is(n):
    length = 128 * n
    layout = balanced(n, length)
    assert [layout.num_tokens(rank) for rank in range(n)] == [128] * n
    assert max(work(layout, [length])) - min(work(layout, [length])) <= length
    assert sum(map(len, layout.spans)) <= sum(map(len, zigzag(n, length).spans))


@pytest.mark.parametrize(("lengths", "n"), [([1024] * 64, 8), ([1024] * 64, 64), ([100, 300] * 20, 4), ([5] * 12, 3)])
def test_short_documents_stay_whole(lengths, n):
    layout = balanced_pack(lengths, n)
    assert all(len(ranks) == 1 for ranks in homes(layout, lengths))
    assert {layout.num_tokens(rank) for rank in range(n)} == {sum(lengths) // n}


def test_a_long_document_spreads_and_the_short_ones_stay():
    """The long one has a quarter of the tokens and nearly all work, so all ranks must share it."""
    lengths = [16384, *[256] * 192]
    holders = homes(balanced_pack(lengths, 8), lengths)
    assert len(holders[0]) == 8
    assert sum(len(ranks) > 1 for ranks in holders[1:]) <= 7, "a rank cuts one short document at most"


@given(packs, st.integers(1, 9))
def test_ranks_share_at_most_two_documents_each(lengths, n):
    assert sum(len(ranks) > 1 for ranks in homes(balanced_pack(lengths, n), lengths)) <= 2 * (n - 1)


def test_positions_count_and_not_the_place_in_the_sequence():
    """A branch of a tree of prefixes begins at a high position, so it is denser than the beginning of a document."""
    layout = balanced(2, 300, 1, [(0, 100, 0), (100, 200, 1000), (200, 300, 0)])
    assert sum(100 <= token < 200 for token in layout.tokens(0)) in (49, 50, 51)
