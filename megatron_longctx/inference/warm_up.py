"""What an engine computes before its first prompt, so that this need not wait for what kernels prepare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..comm import sum_over
from ..kernels.planned import PlannedShapes
from .sampling import Sampling

if TYPE_CHECKING:
    from .engine import LongContextEngine

_LENGTHS = (67, 130)


def run_prompts(engine: LongContextEngine, most: int) -> None:
    """Prompts of two lengths, since what is compiled for any length is compiled at the second one it sees.

    Args:
        most: tokens that a sequence can have now.
    """
    for length in _LENGTHS:
        if length + 1 > most:
            return
        session = engine.open()
        try:
            session.append([0] * length)
            generation = engine.start(session, Sampling(max_new_tokens=2))
            for _ in range(2):
                engine.step([generation])
        finally:
            session.close()


def meet_rows(engine: LongContextEngine, sizes: Sequence[int], most: int) -> None:
    """Prompts of all sizes that the decoder has graphs of.

    Args:
        sizes: in ascending order. most: tokens that a sequence can have now.
    """
    for before, size in zip((1, *sizes), sizes, strict=False):
        length = min(size, most)
        if length <= before:
            return
        session = engine.open()
        try:
            session.append([0] * length)
        finally:
            session.close()


def meet_batches(engine: LongContextEngine, sizes: Sequence[int], pages: int) -> None:
    """Single tokens of so many sequences at once.

    Args:
        pages: that are free on every rank; a sequence takes one.
    """
    for size in sizes:
        if size > pages:
            return
        sessions = [engine.open() for _ in range(size)]
        try:
            engine.append({session: [0] for session in sessions})
        finally:
            for session in sessions:
                session.close()


def meet_shapes(engine: LongContextEngine, chunk: int, most: int) -> None:
    """Chunks of prompts over a cache that is taken for filled, whatever lies there, where all ranks' kernels plan.

    Args:
        chunk: most new tokens of a sequence computed at once. most: tokens that a sequence can have now.
    """
    attention, n = engine.model.attention, engine.ledger.n
    shapes = attention.shapes
    # Hosts may have different kernels, and a rank that computed these alone would wait for the others.
    planning = sum_over(attention.group, torch.tensor(int(shapes is not None), device=attention.device))
    if shapes is None or int(planning) < n:
        return
    most_new = min(chunk, most) // n
    for new, cached in turns_with_all(shapes, most_new, most // n - most_new):
        session = engine.open()
        try:
            if cached:
                engine.ledger.append({session.number: n * cached})
                session.tokens = [0] * (n * cached)
            session.append([0] * (n * new))
        finally:
            session.close()


def turns_with_all(shapes: PlannedShapes, most_new: int, most_cached: int) -> list[tuple[int, int]]:
    """(new, cached) tokens a rank; together their calls have all shapes of up to `most_new` queries and, of rectangles,
    `most_cached` keys."""

    def sizes(least: int, most: int) -> list[int]:
        """The largest power of two, and all smaller ones in a sum."""
        largest = 1 << max(min(most, shapes.most), 1).bit_length() - 1
        return [size for size in (largest, largest - least) if size >= least]

    return [
        (new, cached)
        for new in sizes(shapes.least_queries, most_new)
        for cached in sizes(shapes.least_keys, most_cached) or [0]
    ]
