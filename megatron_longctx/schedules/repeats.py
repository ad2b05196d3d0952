"""Which steps of a rank repeat: with many ranks most do, so that a shorter plan says what all of them take.

A step of a rank is named by what it sends, receives and attends, where other ranks go by how many of them came between
their first block and this step. Steps of one name do the same to blocks that came as long before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .plan import Attend, Block, Move, Plan, Step

Rows = NDArray[np.int32]

T = TypeVar("T")

_PERIODS, _EDGE, _LONGEST = 3, 6, 16
"""Repetitions after which a program repeats, too: accumulators take three parts at a time, buffers take turns. Those at
either end that may differ. The most steps of what is sought."""
_KINDS, _CALL = 4, 2
_FAR = 1 << 30


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
        self._parts = _Parts(plan)
        self._names: dict[bytes, int] = {}
        self._short: dict[tuple[object, ...], Plan | None] = {}

    def short(self, rank: int) -> Short:
        """That of one rank; in it, the rank keeps its number, and others have numbers of their own."""
        plan = self.plan
        names = [self._names.setdefault(rows, len(self._names)) for rows in self._parts.of(rank)]
        kept, cuts = _kept(names)
        where = [cut[:2] for cut in cuts]
        key = (plan.queries.num_tokens(rank), plan.keys.num_tokens(rank), *where, *(names[t] for t in kept))
        if key not in self._short:
            self._short[key] = self._shorter(rank, kept, cuts)
        found = self._short[key]
        return Short((-1, rank), plan, ()) if found is None else Short(key, found, cuts)

    def _shorter(self, rank: int, kept: list[int], cuts: tuple[Cut, ...]) -> Plan | None:
        """The plan of some steps; None where a block stays for longer than a part that is cut out."""
        plan = self.plan
        if not cuts:
            return plan
        before, met = self._parts.before[rank].tolist(), self._parts.met[rank].tolist()
        rows = list(self._parts.of(rank))
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
            if now - _reach(rows[t]) < oldest:
                return None

            def named(block: Block, left_out: int = left_out) -> Block:
                home, origin = block.home, block.origin
                if home != rank:
                    home = plan.n + met[home] - left_out
                if origin not in (-1, rank):
                    origin = -2 - origin if plan.sum_in_node else plan.n + met[plan.n + origin] - left_out
                return block._replace(home=home, origin=origin)

            moves = [Move(named(block), rank, -1) for block, _, _ in plan.sends(rank)[t]]
            moves += [Move(named(block), -1, rank) for block, _, _ in plan.receives(rank)[t]]
            calls = tuple(
                Attend(tuple(map(named, each.queries)), tuple(map(named, each.keys)), each.slices)
                for each in plan.steps[t].attends[rank]
            )
            steps.append(Step(tuple(moves), ((),) * rank + (calls,)))
        return replace(plan, steps=tuple(steps))


class _Parts:
    """Every rank's part of a plan, by step, as rows of three integers.

    A row is a block that is sent, received or attended: which of these and what block, and how many other ranks came
    first between the one of its home, or of its origin, and this step. Or it is a call, with the number of its blocks.

    before: by rank and step, how many ranks came before it. met: by rank, how many came before each rank as a home,
    and behind these before each as an origin.
    """

    def __init__(self, plan: Plan) -> None:
        n, num_steps = plan.n, len(plan.steps)
        moves = list(chain.from_iterable(step.moves for step in plan.steps))
        calls_of = list(chain.from_iterable(step.attends for step in plan.steps))
        calls = list(chain.from_iterable(calls_of))
        queries, keys, slices = (list(map(itemgetter(i), calls)) for i in range(3))
        sizes = np.array([list(map(len, queries)), list(map(len, keys))], np.int32).T
        blocks = list(map(itemgetter(0), moves))
        blocks += chain.from_iterable(chain.from_iterable(zip(queries, keys, strict=True)))
        of_blocks = _numbered(blocks, lambda block: (block[0], *block[2:4], block[5]), (1, 4))
        of_calls = np.column_stack((_numbered(slices, tuple), sizes))
        # Who sends, receives, calls and attends what, in which step; then by rank and by step.
        steps = np.repeat(np.arange(num_steps), [len(step.moves) for step in plan.steps])
        called = np.repeat(np.arange(n * num_steps), list(map(len, calls_of)))
        attended = np.repeat(called, sizes.sum(1))
        ends = (np.fromiter(map(itemgetter(end), moves), int, len(moves)) for end in (1, 2))
        steps, ranks = np.divmod(np.concatenate([*(n * steps + end for end in ends), called, attended]), n)
        kinds = np.repeat(range(_KINDS), (len(moves), len(moves), len(called), len(attended)))
        small = np.min_scalar_type(max(n, num_steps))  # sorts faster
        order = np.lexsort((steps.astype(small), ranks.astype(small)))
        ranks, kinds, at = ranks[order], kinds[order], (ranks * num_steps + steps)[order]
        self._ends = np.append(0, np.bincount(at, minlength=n * num_steps).cumsum())
        of_moves = of_blocks[: len(moves)]
        rows = np.concatenate((of_moves, of_moves, of_calls, of_blocks[len(moves) :])).take(order, 0)
        # Other ranks are counted as they come.
        others, is_block = rows[:, 1:], (kinds != _CALL)[:, None]
        if plan.sum_in_node:  # which rank of the node has computed a part of a sum says nothing
            others[is_block[:, 0] & (others[:, 1] != ranks), 1] = -1
        counted = is_block & (others >= 0) & (others != ranks[:, None])
        each = (2 * n * ranks[:, None] + others + np.array((0, n)))[counted]
        at = np.repeat(at[:, None], 2, 1)[counted]
        first = np.zeros(2 * n * n, int)
        first[each[::-1]] = np.arange(len(each))[::-1]
        comes = first[each] == np.arange(len(each))
        coming = np.bincount(at[comes], minlength=n * num_steps).reshape(n, num_steps)
        self.before, of_rank = coming.cumsum(1) - coming, coming.sum(1)
        self.met = np.zeros((n, 2 * n), int)
        self.met.flat[each[comes]] = np.arange(comes.sum()) - np.repeat(of_rank.cumsum() - of_rank, of_rank)
        since = np.where(others < 0, _FAR, -_FAR)
        since[counted] = self.before.ravel()[at] - self.met.ravel()[each]
        np.copyto(others, since, where=is_block, casting="same_kind")
        rows[:, 0] = _KINDS * rows[:, 0] + kinds
        self._rows = rows

    def of(self, rank: int) -> Iterator[bytes]:
        """The rows of a rank's steps."""
        num_steps = self.before.shape[1]
        ends = self._ends[rank * num_steps : (rank + 1) * num_steps + 1]
        rows = self._rows[ends[0] : ends[-1]].tobytes()
        for start, stop in pairwise((self._rows.strides[0] * (ends - ends[0])).tolist()):
            yield rows[start:stop]


def _reach(rows: bytes) -> int:
    """How many ranks before a step the one of its oldest block first came."""
    found = np.frombuffer(rows, np.int32).reshape(-1, 3)
    since = found[found[:, 0] % _KINDS != _CALL, 1:]
    return int(since[since < _FAR].max(initial=0))


def _numbered(things: Sequence[T], value: Callable[[T], object], fields: Sequence[int] = ()) -> Rows:
    """A row for each: equal values as equal numbers, and some of its fields. Plans share most of their objects."""
    ids = np.fromiter(map(id, things), np.int64, len(things))
    _, first, places = np.unique(ids, return_index=True, return_inverse=True)
    found = [things[i] for i in first.tolist()]
    numbers: dict[object, int] = {}
    columns = [[numbers.setdefault(each, len(numbers)) for each in map(value, found)]]
    columns += [list(map(itemgetter(field), found)) for field in fields]
    return np.array(columns, np.int32).T.take(places, 0)


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
