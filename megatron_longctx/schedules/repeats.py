"""Which steps of a rank repeat: with many ranks most do, so that a shorter plan says what all of them take.

A step of a rank is named by what it sends, receives and attends, where other ranks go by how many of them came between
their first block and this step. Steps of one name do the same to blocks that came as long before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple, TypeVar

from .plan import Attend, Block, Move, Plan, Step

T = TypeVar("T")

_PERIODS, _EDGE, _LONGEST = 3, 6, 16
"""Repetitions after which a program repeats, too: accumulators take three parts at a time, buffers take turns. Those at
either end that may differ. The most steps of what is sought."""


class Cut(NamedTuple):
    """Steps `start..stop-1` of a shorter plan, which come so many `times` more."""

    start: int
    stop: int
    times: int

    def repeats(self, steps: list[T]) -> bool:
        """Whether what was found of these steps is found of as many behind them."""
        return steps[self.start : self.stop] == steps[self.stop : 2 * self.stop - self.start]


class Short(NamedTuple):
    """One rank's part of a plan without the steps that repeat. key: equal for ranks that do the same."""

    key: tuple[object, ...]
    plan: Plan
    cuts: tuple[Cut, ...]

    def all_of(self, steps: list[T]) -> list[T]:
        """By step of the whole plan, what was found of the shorter one's (and behind its last)."""
        found: list[T] = []
        at = 0
        for start, stop, times in self.cuts:
            found += steps[at:stop]
            found += steps[start:stop] * times
            at = stop
        return [*found, *steps[at:]]


class Repeats:
    """A plan's ranks, each by its own part of the plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._names: dict[tuple[object, ...], int] = {}
        self._reach: list[float] = []  # by name, how many ranks before the step the one of its oldest block first came
        self._short: dict[tuple[object, ...], Plan | None] = {}

    def short(self, rank: int) -> Short:
        """That of one rank; in it, the rank keeps its number, and others have numbers of their own."""
        plan = self.plan
        met: dict[int, float] = {rank: inf, -1: -inf}  # the ranks that have come before, numbered
        before: list[int] = []
        names: list[int] = []
        for step, sends, receives in zip(plan.steps, plan.sends(rank), plan.receives(rank), strict=True):
            before.append(len(met))
            names.append(self._named(sends, receives, step, rank, met))
        kept, cuts = _kept(names)
        where = [cut[:2] for cut in cuts]
        key = (plan.queries.num_tokens(rank), plan.keys.num_tokens(rank), *where, *(names[t] for t in kept))
        if key not in self._short:
            self._short[key] = self._shorter(rank, kept, cuts, names, before, met)
        found = self._short[key]
        return Short((-1, rank), plan, ()) if found is None else Short(key, found, cuts)

    def _named(self, sends: list[Move], receives: list[Move], step: Step, rank: int, met: dict[int, float]) -> int:
        now, own = len(met), (-1, rank)
        blocks = [move[0] for move in sends]
        blocks += [move[0] for move in receives]
        name: list[object] = [len(sends), len(receives)]
        for queries, keys, slices in step.attends[rank]:
            blocks += queries
            blocks += keys
            name += (len(queries), len(keys), slices)
        for kind, home, start, stop, origin, heads in blocks:
            if home not in met:
                met[home] = len(met)
            by = origin if origin in own else -2 - origin
            if by not in met:
                met[by] = len(met)
            name += (kind, now - met[home], start, stop, now - met[by], heads)
        found = self._names.setdefault(tuple(name), len(self._names))
        if found == len(self._reach):
            away = (met[each] for block in blocks for each in (block.home, -2 - block.origin) if each in met)
            self._reach.append(now - min(each for each in (*away, now) if each != -inf))
        return found

    def _shorter(
        self,
        rank: int,
        kept: list[int],
        cuts: tuple[Cut, ...],
        names: list[int],
        before: list[int],
        met: dict[int, float],
    ) -> Plan | None:
        """The plan of some steps; None where a block stays for longer than a part that is cut out.

        Args:
            before: by step, how many ranks came before it.
        """
        plan = self.plan
        if not cuts:
            return plan
        left_out = 0  # ranks that come in steps that are left out
        steps = []
        ends = {cut.stop + (cut.stop - cut.start): cut for cut in cuts}
        new: list[int] = []
        oldest = 0
        for place, t in enumerate(kept):
            if place and t != kept[place - 1] + 1:
                left_out += before[t] - before[kept[place - 1] + 1]
            now = before[t] - left_out
            new.append(now)
            if place in ends:
                oldest = new[ends[place].start]
            if now - self._reach[names[t]] < oldest:
                return None

            def named(block: Block, left_out: int = left_out) -> Block:
                home, origin = block.home, block.origin
                if home != rank:
                    home = plan.n + int(met[home]) - left_out
                if origin not in (-1, rank):
                    origin = plan.n + int(met[-2 - origin]) - left_out
                return block._replace(home=home, origin=origin)

            moves = [Move(named(block), rank, -1) for block, _, _ in plan.sends(rank)[t]]
            moves += [Move(named(block), -1, rank) for block, _, _ in plan.receives(rank)[t]]
            calls = tuple(
                Attend(tuple(map(named, each.queries)), tuple(map(named, each.keys)), each.slices)
                for each in plan.steps[t].attends[rank]
            )
            steps.append(Step(tuple(moves), ((),) * rank + (calls,)))
        return replace(plan, steps=tuple(steps))


def _kept(names: Sequence[int]) -> tuple[list[int], tuple[Cut, ...]]:
    """The steps that a shorter plan has, and in its numbers what is left out."""
    kept: list[int] = []
    cuts: list[Cut] = []
    t = 0
    while t < len(names):
        period = next((p for p in range(1, _LONGEST + 1) if names[t : t + 1] == names[t + p : t + p + 1]), 0)
        stop = t + period
        while period and stop < len(names) and names[stop] == names[stop - period]:
            stop += 1
        unit = _PERIODS * period
        times = (stop - t - 2 * _EDGE * period) // unit - 2 if period else 0
        if times > 0:
            first = len(kept) + _EDGE * period
            cuts.append(Cut(first, first + unit, times))
            kept += range(t, t + _EDGE * period + 2 * unit)
            t += _EDGE * period + (2 + times) * unit
        else:
            now, t = t, max(t + 1, stop - _LONGEST)
            kept += range(now, t)
    return kept, tuple(cuts)
