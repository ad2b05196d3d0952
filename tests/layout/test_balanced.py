"""The layout of packs: exact balance of tokens and of work, and whole documents, for any lengths."""

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_longctx.layout import Layout, balanced, zigzag
from megatron_longctx.layout.balanced import SLACK


def of(lengths: Sequence[int], n: int, unit: int = 1) -> Layout:
    ends = list(accumulate(lengths, initial=0))
    return balanced(n, ends[-1], unit, [(stop - each, stop, 0) for each, stop in zip(lengths, ends[1:], strict=True)])


def work(layout: Layout, lengths: Sequence[int]) -> list[int]:
    """By rank, the keys that its tokens see in their documents."""
    position = [token for length in lengths for token in range(1, length + 1)]
    return [sum(position[token] for token in layout.tokens(rank)) for rank in range(layout.n)]


def homes(layout: Layout, lengths: Sequence[int]) -> list[set[int]]:
    """By document, the ranks that hold any of it."""
    stops = list(accumulate(lengths))
    found: list[set[int]] = [set() for _ in lengths]
    for rank in range(layout.n):
        for span in layout.spans[rank]:
            for number, (stop, length) in enumerate(zip(stops, lengths, strict=True)):
                if span.start < stop and stop - length < span.stop:
                    found[number].add(rank)
    return found


packs = st.one_of(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.lists(st.integers(1, 4000), min_size=1, max_size=8),
    st.tuples(st.integers(1, 500), st.integers(1, 30)).map(lambda alike: [alike[0]] * alike[1]),
)


@given(packs, st.integers(1, 12), st.integers(1, 8))
@example([1], 12, 8)
@example([7, 1, 1], 3, 3)
@example([1602, 1598], 2, 8)  # whole documents would do, but for the unit
def test_tokens_and_work_are_equal_for_every_pack(lengths, n, unit):
    """Up to the slack, a unit and the rounding of cuts to tokens, wherever they fall."""
    lengths = [*lengths, *([rest] if (rest := -sum(lengths) % unit) else [])]
    layout = of(lengths, n, unit)
    held = [list(layout.tokens(rank)) for rank in range(n)]
    assert sorted(token for tokens in held for token in tokens) == list(range(sum(lengths)))
    assert all(tokens == sorted(tokens) for tokens in held)
    assert all(len(span) for spans in layout.spans for span in spans)
    sizes, done = [len(tokens) for tokens in held], work(layout, lengths)
    assert all(size % unit == 0 for size in sizes)
    share = sum(sizes) / n
    assert max(abs(size - share) for size in sizes) <= 2 * SLACK * share + unit
    of_all = sum(done) / n
    assert max(abs(each - of_all) for each in done) <= 2 * SLACK * of_all + (unit + 1) * max(lengths)


@given(st.integers(0, 2**32), st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2, 8]))
def test_real_packs_are_balanced_to_one_percent(seed, n, unit):
    """Whose longest document is under a quarter; every weight of tokens against pairs is then balanced as well."""
    draw, lengths, most = random.Random(seed), [], 16384
    while sum(lengths) < most:
        lengths.append(min(max(int(draw.lognormvariate(6, 1)), 16), most // 4 - 1, most - sum(lengths)))
    layout = of(lengths, n, unit)
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
    layout = of(lengths, n)
    assert all(len(ranks) == 1 for ranks in homes(layout, lengths))
    assert {layout.num_tokens(rank) for rank in range(n)} == {sum(lengths) // n}


def test_a_long_document_spreads_and_the_short_ones_stay():
    """A quarter of the tokens, nearly all of the work: all ranks have to share it, and fill up with whole others."""
    lengths = [16384, *[256] * 192]
    found = homes(of(lengths, 8), lengths)
    assert len(found[0]) == 8
    assert sum(len(ranks) > 1 for ranks in found[1:]) <= 7, "a rank cuts one short document at most"


@given(packs, st.integers(1, 9))
def test_ranks_share_at_most_two_documents_each(lengths, n):
    found = homes(of(lengths, n), lengths)
    assert sum(len(ranks) > 1 for ranks in found) <= 2 * (n - 1)


def test_positions_count_and_not_the_place_in_the_sequence():
    """A branch of a tree of prefixes begins late and is denser than one that begins a document."""
    layout = balanced(2, 300, 1, [(0, 100, 0), (100, 200, 1000), (200, 300, 0)])
    assert sum(100 <= token < 200 for token in layout.tokens(0)) in (49, 50, 51)
