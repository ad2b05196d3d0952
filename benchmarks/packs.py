"""Packs of documents by name: those that others were measured with, and ones drawn from published distributions."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, pairwise

UNIT = 16
"""Documents come in multiples of it: TransformerEngine takes no others on 8 ranks, and it is to be measured beside."""

# MagiAttention, exps/dist_attn/benchmark/utils.py: shares of documents by length, for sequences above 64K tokens.
_PUBLISHED = {(0, 2): 0.16, (2, 4): 0.05, (4, 8): 0.04, (8, 16): 0.06, (16, 32): 0.08, (32, 64): 0.21, (64, 128): 0.4}


def log_normals() -> list[tuple[int, ...]]:
    """Three packs drawn one after the other: 24 documents of 64K tokens in all, 6 of 64K and 15 of 128K."""
    draw = random.Random(0)

    def pack(mu: float, sigma: float, length: int) -> tuple[int, ...]:
        return _filled(length, lambda: max(int(draw.lognormvariate(mu, sigma)), 16))

    return [pack(7.5, 1.2, 2**16), pack(9.2, 0.8, 2**16), pack(8.0, 1.3, 2**17)]


def published(length: int = 2**17) -> tuple[int, ...]:
    """Documents of MagiAttention's distribution, each a quarter of the pack at most."""
    draw, kinds, weights = random.Random(0), list(_PUBLISHED), list(_PUBLISHED.values())

    def one() -> int:
        ((low, high),) = draw.choices(kinds, weights)
        return min(max(draw.randint(1024 * low, 1024 * high), 1), length // 4)

    return _filled(length, one)


def drawn(kind: str, tokens: int) -> tuple[int, ...]:
    """Lengths of a dataset's documents.

    log_normal: as the packs of 128K are drawn. long_tail: most under 4K tokens, and one in a hundred of 128K, which
    have two fifths of the tokens.

    Raises:
        ValueError: another kind.
    """
    draw = random.Random(0)
    kinds: dict[str, Callable[[], int]] = {
        "log_normal": lambda: min(max(int(draw.lognormvariate(8.0, 1.3)), 16), 2**17),
        "long_tail": lambda: 2**17 if draw.random() < 0.01 else draw.randint(UNIT, 4096),
    }
    if kind not in kinds:
        raise ValueError(f"documents of kind {kind}: expected one of {', '.join(kinds)}. Choose one of these.")
    return _filled(tokens, kinds[kind])


def _filled(length: int, draw: Callable[[], int]) -> tuple[int, ...]:
    """Documents until they are so many tokens; the last one is cut, and all but it are rounded to units."""
    found: list[int] = []
    left = length
    while left:
        drawn = min(draw(), left)
        left -= drawn
        found.append(drawn)
    ends = list(accumulate((max(UNIT, round(each / UNIT) * UNIT) for each in found), initial=0))
    rounded = [min(stop, length) - start for start, stop in pairwise(ends) if start < length]
    rounded[-1] += length - sum(rounded)
    return tuple(rounded)


def packs() -> dict[str, tuple[int, ...]]:
    """By name."""
    many, few, long = log_normals()
    return {"24": many, "6": few, "15": long, "64x1K": (1024,) * 64, "magi": published()}
