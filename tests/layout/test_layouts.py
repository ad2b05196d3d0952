"""Token layouts: literal token lists, and what holds for every layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.layout import LAYOUTS, Layout, build_layout, contiguous, striped, zigzag

LITERAL = {
    ("contiguous", 1, 5): [[0, 1, 2, 3, 4]],
    ("contiguous", 2, 8): [[0, 1, 2, 3], [4, 5, 6, 7]],
    ("contiguous", 2, 7): [[0, 1, 2], [3, 4, 5, 6]],
    ("contiguous", 3, 7): [[0, 1], [2, 3], [4, 5, 6]],
    ("contiguous", 4, 8): [[0, 1], [2, 3], [4, 5], [6, 7]],
    ("contiguous", 4, 10): [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]],
    ("contiguous", 4, 2): [[], [0], [], [1]],
    ("contiguous", 3, 0): [[], [], []],
    ("zigzag", 1, 5): [[0, 1, 2, 3, 4]],
    ("zigzag", 2, 8): [[0, 1, 6, 7], [2, 3, 4, 5]],
    ("zigzag", 2, 5): [[0, 3, 4], [1, 2]],
    ("zigzag", 3, 12): [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]],
    ("zigzag", 3, 10): [[0, 8, 9], [1, 2, 6, 7], [3, 4, 5]],
    ("zigzag", 4, 8): [[0, 7], [1, 6], [2, 5], [3, 4]],
    ("zigzag", 4, 3): [[2], [], [0, 1], []],
    ("zigzag", 2, 1): [[0], []],
    ("zigzag", 3, 0): [[], [], []],
    ("striped", 1, 5): [[0, 1, 2, 3, 4]],
    ("striped", 2, 8): [[0, 2, 4, 6], [1, 3, 5, 7]],
    ("striped", 2, 7): [[0, 2, 4, 6], [1, 3, 5]],
    ("striped", 3, 7): [[0, 3, 6], [1, 4], [2, 5]],
    ("striped", 4, 8): [[0, 4], [1, 5], [2, 6], [3, 7]],
    ("striped", 4, 2): [[0], [1], [], []],
    ("striped", 3, 0): [[], [], []],
}

LITERAL_UNITS = {
    ("contiguous", 2, 12, 4): [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]],
    ("contiguous", 3, 4, 2): [[], [0, 1], [2, 3]],
    ("zigzag", 2, 8, 2): [[0, 1, 6, 7], [2, 3, 4, 5]],
    ("zigzag", 2, 10, 2): [[0, 1, 6, 7, 8, 9], [2, 3, 4, 5]],
    ("zigzag", 2, 4, 4): [[0, 1, 2, 3], []],
    ("striped", 2, 8, 2): [[0, 2, 4, 6], [1, 3, 5, 7]],
}


def test_every_document_is_in_zigzag_over_all_ranks():
    documents = [(0, 8, 0), (8, 9, 0), (9, 13, 0)]
    held = tokens_by_rank(build_layout("per_document", 2, 13, documents=documents))
    assert held == [[0, 1, 6, 7, 8, 9, 12], [2, 3, 4, 5, 10, 11]]
    assert tokens_by_rank(build_layout("per_document", 2, 8)) == tokens_by_rank(build_layout("zigzag", 2, 8))
    with pytest.raises(ValueError, match=r"document of 1 tokens: the per_document layout .* multiple of 2"):
        build_layout("per_document", 2, 12, 2, [(0, 8, 0), (8, 9, 0), (9, 12, 0)])


def tokens_by_rank(layout: Layout) -> list[list[int]]:
    return [list(layout.tokens(rank)) for rank in range(layout.n)]


@pytest.mark.parametrize(("name", "n", "length"), LITERAL)
def test_who_holds_what(name, n, length):
    layout = build_layout(name, n, length)
    assert tokens_by_rank(layout) == LITERAL[name, n, length]
    assert (layout.name, layout.n, layout.length) == (name, n, length)


@pytest.mark.parametrize(("name", "n", "length", "unit"), LITERAL_UNITS)
def test_who_holds_what_in_units(name, n, length, unit):
    assert tokens_by_rank(build_layout(name, n, length, unit)) == LITERAL_UNITS[name, n, length, unit]


def test_functions_build_what_their_names_say():
    for name, function in (("contiguous", contiguous), ("zigzag", zigzag), ("striped", striped)):
        assert LAYOUTS[name] is function
        assert function(3, 10, 1) == build_layout(name, 3, 10)


ranks = st.integers(1, 12)
names = st.sampled_from(sorted(LAYOUTS))


@given(names, ranks, st.integers(0, 200))
def test_every_token_is_held_once_in_ascending_slots(name, n, length):
    held = tokens_by_rank(build_layout(name, n, length))
    assert len(held) == n
    assert sorted(token for tokens in held for token in tokens) == list(range(length))
    assert all(tokens == sorted(tokens) for tokens in held)


@given(names, ranks, st.integers(0, 200))
def test_token_and_locate_are_inverse(name, n, length):
    layout = build_layout(name, n, length)
    held = tokens_by_rank(layout)
    for rank in range(n):
        assert layout.num_tokens(rank) == len(held[rank])
        for slot, token in enumerate(held[rank]):
            assert layout.token(rank, slot) == token
            assert layout.locate(token) == (rank, slot)


@given(st.sampled_from(["contiguous", "striped", "zigzag"]), ranks, st.integers(0, 40), st.integers(1, 8))
def test_shares_are_whole_units_and_nearly_equal(name, n, units, unit):
    length = units * unit * (n if name == "striped" and unit > 1 else 1)
    layout = build_layout(name, n, length, unit)
    sizes = [layout.num_tokens(rank) for rank in range(n)]
    assert sum(sizes) == length
    assert all(size % unit == 0 for size in sizes)
    pieces = [len(span) for spans in layout.spans for span in spans]
    assert max(pieces) - min(pieces) <= unit
    assert max(sizes) - min(sizes) <= (2 * unit if name == "zigzag" else unit)


@given(names, ranks, st.integers(0, 50))
def test_tokens_outside_are_refused(name, n, length):
    layout = build_layout(name, n, length)
    for token in (-1, length, length + n):
        with pytest.raises(IndexError, match=f"tokens 0..{length - 1}, not token {token}"):
            layout.locate(token)
    for rank in range(n):
        for slot in (-1, layout.num_tokens(rank)):
            with pytest.raises(
                IndexError, match=f"rank {rank} .* has {layout.num_tokens(rank)} slots, not slot {slot}"
            ):
                layout.token(rank, slot)


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
    ],
)
def test_wrong_sizes_are_refused_with_their_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_layout(*arguments)
