"""Backward plans whose last messages have something to run beside."""

from __future__ import annotations

from dataclasses import replace

from .collector import collector_paused
from .plan import Attend, Plan
from .transpose import transpose

LEAST_TOKENS = 2048
"""Tokens of a rank below which its own block is one call: smaller ones take as long as their launch."""


@collector_paused()
def backward_plan(plan: Plan) -> Plan:
    """The backward plan that is run: `transpose`, ordered so that the first and the last messages are hidden.

    Keys and values arrive while a rank works on its own block, and so do the last gradients: the first part of the
    block comes before everything else, the rest of it after.

    Raises:
        ValueError: `plan` is a backward plan already.
    """
    backward = transpose(plan)
    if len(backward.steps) < 2 or any(backward.steps[-1].attends):
        return backward
    # The message behind a sum within a node waits for no call beside it, so that both are hidden by the one before.
    at = len(backward.steps) - (2 if len(backward.steps) > len(plan.steps) + 1 else 1)
    first, *rest = backward.steps
    before, after = [], []
    for rank, attends in enumerate(first.attends):
        now, later = _divided(attends, rank)
        before.append(now)
        after.append(later)
    rest[at - 1] = rest[at - 1]._replace(attends=tuple(after))
    return replace(backward, steps=(first._replace(attends=tuple(before)), *rest))


def _divided(attends: tuple[Attend, ...], rank: int) -> tuple[tuple[Attend, ...], tuple[Attend, ...]]:
    """What a rank does first and what it does last, of its calls in the first step: its own block in two halves of the
    queries."""
    if len(attends) != 1 or attends[0].num_queries < LEAST_TOKENS:
        return attends, ()
    (whole,) = attends
    if any(block.home != rank for block in (*whole.queries, *whole.keys)) or len(whole.queries) > 1:
        return attends, ()
    middle = whole.num_queries // 2
    front, back = whole.part(0, middle), whole.part(middle, whole.num_queries)
    return ((front,) if front else ()), ((back,) if back else ())
