"""What an engine computes before its first prompt, so that this need not wait for what kernels prepare."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

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
        with closing(engine.open()) as session:
            session.append([0] * length)
            generation = engine.start(session, Sampling(max_new_tokens=2))
            for _ in range(2):
                engine.step([generation])


def meet_rows(engine: LongContextEngine, sizes: Sequence[int], most: int) -> None:
    """Prompts of all sizes that the decoder has graphs of.

    Args:
        sizes: in ascending order. most: tokens that a sequence can have now.
    """
    for before, size in zip((1, *sizes), sizes, strict=False):
        length = min(size, most)
        if length <= before:
            return
        with closing(engine.open()) as session:
            session.append([0] * length)


def meet_batches(engine: LongContextEngine, sizes: Sequence[int], pages: int) -> None:
    """Single tokens of so many sequences at once.

    Args:
        pages: that are free on every rank; a sequence takes one.
    """
    for size in sizes:
        if size > pages:
            return
        with ExitStack() as opened:
            sessions = [opened.enter_context(closing(engine.open())) for _ in range(size)]
            engine.append({session: [0] for session in sessions})
