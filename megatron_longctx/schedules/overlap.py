"""Backward plans whose last messages have something to run beside."""

from __future__ import annotations

from dataclasses import replace

from .plan import Attend, Plan, Step
from .transpose import transpose

LEAST_TOKENS = 2048
"""Tokens of a rank below which its own block is one call: smaller ones take as long as their launch."""


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
    first, *middle, last = backward.steps
    before, after = [], []
    for rank, attends in enumerate(first.attends):
        now, later = _divided(attends, rank)
        before.append(now)
        after.append(later)
    steps = (first._replace(attends=tuple(before)), *middle, Step(last.moves, tuple(after)))
    return replace(backward, steps=steps)


def _divided(attends: tuple[Attend, ...], rank: int) -> tuple[tuple[Attend, ...], tuple[Attend, ...]]:
    """What a rank does first and what it does last, of its calls in the first step: its own block in two halves of the
    queries."""
    if len(attends) != 1 or attends[0].num_queries < LEAST_TOKENS:
        return attends, ()
    (whole,) = attends
    if any(block.home != rank for block in (*whole.queries, *whole.keys)) or len(whole.queries) > 1:
        return attends, ()
    middle = whole.num_queries // 2
    front, back = _part(whole, 0, middle), _part(whole, middle, whole.num_queries)
    return ((front,) if front else ()), ((back,) if back else ())


def _part(attend: Attend, start: int, stop: int) -> Attend | None:
    """What the gathered queries `start..stop-1` see, over the keys that they see any of."""
    slices = [found for each in attend.slices if (found := each.cut(start, stop, 0, attend.num_keys)) is not None]
    if not slices:
        return None
    q0, q1 = min(each.q_start for each in slices), max(each.q_stop for each in slices)
    k0, k1 = min(each.k_start for each in slices), max(each.k_stop for each in slices)
    (query,) = attend.queries
    keys, at = [], 0
    for key in attend.keys:
        low, high = max(k0 - at, 0), min(k1 - at, key.tokens)
        if low < high:
            keys.append(key._replace(start=key.start + low, stop=key.start + high))
        at += key.tokens
    query = query._replace(start=query.start + q0, stop=query.start + q1)
    return Attend((query,), tuple(keys), tuple(each.moved(-q0, -k0) for each in slices))
