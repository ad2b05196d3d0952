"""Ranges of positions, and the means of losses in them."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.evaluation.positions import Losses, edges


@given(st.integers(1, 2**30))
def test_ranges_cover_a_text_and_grow_with_the_position(length: int) -> None:
    found = edges(length)
    assert found[0] == 0 and found[-1] == length and found == sorted(set(found))
    assert len(found) <= 2 * length.bit_length() + 2
    assert all(stop - first <= max(16, first / 2) for first, stop in pairwise(found))


def test_known_ranges() -> None:
    assert edges(1) == [0, 1] and edges(16) == [0, 16] and edges(100) == [0, 16, 24, 32, 48, 64, 96, 100]


def test_means_are_over_tokens_and_not_over_ranges() -> None:
    found = Losses(28, (3.0, 0.0, 3.0), (1.0, 0.0, 3.0))
    assert found.mean == 1.5 and found.tokens == 4 and found.perplexity == math.exp(1.5)
    assert found.ranges() == [(0, 16, 1.0, 3.0), (16, 24, 0.0, None), (24, 28, 3.0, 1.0)]
