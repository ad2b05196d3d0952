"""Ranges of positions in a text, in which losses are averaged: what a longer context is worth shows between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_FIRST = 16  # positions of the first range: each alone would have one token of a text


def edges(length: int) -> list[int]:
    """The first position of every range, and `length`: 0, 16, 24, 32, 48, 64, … two ranges for every doubling."""
    found = [0, _FIRST]
    while found[-1] < length:
        found.append(found[-1] + (1 << (found[-1].bit_length() - 2)))
    return [*(edge for edge in found if edge < length), length]


@dataclass(frozen=True)
class Losses:
    """Of a length: sums of token losses (nats) and of their weights, by range of positions."""

    length: int
    sums: Sequence[float]
    weights: Sequence[float]

    @property
    def mean(self) -> float:
        return sum(self.sums) / sum(self.weights)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.mean, 700.0))

    @property
    def tokens(self) -> float:
        return sum(self.weights)

    def ranges(self) -> list[tuple[int, int, float, float | None]]:
        """First position, the one after the last, tokens, and their mean loss; None where there are none."""
        starts = edges(self.length)
        found = zip(starts, starts[1:], self.sums, self.weights, strict=False)
        return [(first, stop, weight, total / weight if weight else None) for first, stop, total, weight in found]
