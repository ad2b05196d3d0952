"""Backward plans whose last messages have something to run beside."""

from __future__ import annotations

from dataclasses import replace

from .build import seal
from .plan import Attend, Plan, Step
from .transpose import transpose

LEAST_TOKENS = 2048
"""Tokens of a rank below which its own block is one call: smaller ones take as long as their launch."""


def backward_plan(plan: Plan) -> Plan:
    """The backward plan that is run: `transpose`, ordered so that the first and the last messages are hidden, sealed.

    Keys and values arrive while a rank works on its own block, and so do the last gradients: the first part of the
    block comes before everything else, the rest of it after.

    Raises:
        ValueError: `plan` is a backward plan already.
    """
    backward = transpose(plan)
    if len(backward.steps) < 2 or any(backward.steps[-1].attends):
        return seal(backward)
    first, *middle, last = backward.steps
    before, after = [], []
    for rank, attends in enumerate(first.attends):
        kept, postponed = _divide(attends, rank)
        before.append(kept)
        after.append(postponed)
    steps = (first._replace(attends=tuple(before)), *middle, Step(last.moves, tuple(after)))
    return seal(replace(backward, steps=steps))


def _divide(attends: tuple[Attend, ...], rank: int) -> tuple[tuple[Attend, ...], tuple[Attend, ...]]:
    """What a rank does first and what it does last, of its calls in the first step."""
    if len(attends) != 1 or not _own(attends[0], rank) or attends[0].num_queries < LEAST_TOKENS:
        return attends, ()
    (whole,) = attends
    (query,), (key,) = whole.queries, whole.keys
    middle = query.start + query.tokens // 2
    front, back = (query._replace(stop=middle),), (query._replace(start=middle),)
    if not whole.causal:
        return (whole._replace(queries=front),), (whole._replace(queries=back),)
    split = key.start + query.tokens // 2
    near, far = (key._replace(stop=split),), (key._replace(start=split),)
    return (Attend(front, near, True),), (Attend(back, near, False), Attend(back, far, True))


def _own(attend: Attend, rank: int) -> bool:
    return len(attend.queries) == len(attend.keys) == 1 and attend.queries[0].home == attend.keys[0].home == rank
