"""Short plans: one rank's part of a plan without its repetitions, for simulation.

With many ranks most steps of a rank repeat, so a short plan suffices to find what all of them take. Two things shorten
it. Steps that do the same to blocks that came equally long before are equal, whatever the ranks of these blocks, and a
cycle of equal steps needs only a few repetitions. Within a step, equal blocks of several ranks that are adjacent
wherever they occur become one block of as many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .cost import Workload
from .equal_ranks import ATTENDED, CALL, OWN, RECEIVED, SENT, PlanRows, distances, equal_rows
from .kernel_calls import KernelSupport
from .mask import Slice
from .plan import RESULTS, Attend, Block, Heads, Kind, Move, Plan, Step
from .send_layout import ALIGNMENT

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]

T = TypeVar("T")

LEAST_RANKS = 16
"""Plans of fewer ranks are lowered faster than compared."""
_UNIT = 3
"""Cycles of a plan after which its program repeats, too: accumulators take three parts at a time, and buffers take
turns."""
_REUSE = 4
"""Units after which send memory repeats. Cycles are cut in multiples of this."""
_EDGE = 6
"""Cycles at either end of a repetition that may differ from the others."""
_LONGEST = 16
"""The most steps of a cycle."""


class Cut(NamedTuple):
    """Steps `start..stop-1` of a short plan, which the whole plan repeats `times` more times."""

    start: int
    stop: int
    times: int

    def repeats(self, steps: list[T]) -> bool:
        """Whether the results of these steps equal those of the same number of steps behind them."""
        return steps[self.start : self.stop] == steps[self.stop : 2 * self.stop - self.start]


class ShortPlan(NamedTuple):
    """One rank's part of a plan without its repetitions."""

    key: tuple[object, ...]  # equal for ranks that do the same
    plan: Plan
    cuts: tuple[Cut, ...] = ()
    joined: frozenset[tuple[Kind, int, Heads]] = frozenset()
    """Kind, tokens and heads of joined results for other ranks. The short plan holds only if one call computes each."""

    def expand(self, steps: list[T]) -> list[T]:
        """Return the results of all steps of the whole plan, and of what follows the last, from the short plan's."""
        found: list[T] = []
        at = 0
        for start, stop, times in self.cuts:
            found += steps[at:stop]
            found += steps[start:stop] * times
            at = stop
        return [*found, *steps[at:]]


class ShortPlans:
    """The short plans of a plan's ranks."""

    def __init__(self, plan: Plan, workload: Workload, takes: KernelSupport) -> None:
        self.plan = plan
        self._parts = _Parts(plan, workload, takes)
        self._names: dict[bytes, int] = {}
        self._known: dict[tuple[object, ...], ShortPlan] = {}

    def of(self, rank: int) -> ShortPlan:
        """Return the short plan of a rank. In it the rank has its own number, and other ranks have arbitrary ones."""
        plan = self.plan
        names = [self._names.setdefault(rows, len(self._names)) for rows in self._parts.of(rank)]
        kept, cuts = _kept(names)
        if self._parts.exchanges_heads:
            names = [self._names.setdefault(rows, len(self._names)) for rows in self._parts.equal(rank)]
        where = [cut[:2] for cut in cuts]
        key = (plan.queries.num_tokens(rank), plan.keys.num_tokens(rank), *where, *(names[t] for t in kept))
        if key not in self._known:
            self._known[key] = self._shorten(rank, kept, ShortPlan(key, plan, cuts))
        found = self._known[key]
        return found._replace(cuts=cuts) if found.key else ShortPlan((-1, rank), plan)

    def _shorten(self, rank: int, kept: list[int], short: ShortPlan) -> ShortPlan:
        """Return `short` with the plan of the steps `kept`.

        It has no key if a block stays on the rank for longer than the part of a cut that the short plan has.
        """
        parts, cuts = self._parts, short.cuts
        if not cuts and not parts.joined[rank]:
            return short
        joined = set()
        steps: list[Step] = []
        homes: list[int] = []  # one per row
        begins: list[int] = []  # the first row of each step
        seams = {2 * cut.stop - cut.start: cut.start for cut in cuts}
        oldest, new = 0, self.plan.n
        for place, t in enumerate(kept):
            begins.append(len(homes))
            if place in seams:
                oldest = begins[seams[place]]
            moves: list[Move] = []
            calls: list[tuple[tuple[list[Block], list[Block]], tuple[Slice, ...]]] = []
            for role, thing, since, times in parts.rows(rank, t):
                if isinstance(thing, Attend):
                    calls.append((([], []), thing.slices))
                    homes.append(-1)
                    continue
                if since > len(homes) - oldest:
                    return ShortPlan((), self.plan)
                kind, home, start, stop, origin, heads = thing
                if since != OWN:
                    home = homes[-since] if since else new
                    new += not since
                homes.append(home)
                block = Block(kind, home, start, start + times * (stop - start), origin, heads)
                if times > 1 and kind in RESULTS:
                    joined.add((kind, block.tokens, heads))
                if role == ATTENDED:
                    calls[-1][0][kind is not Kind.Q].append(block)
                else:
                    moves.append(Move(block, rank, -1) if role == SENT else Move(block, -1, rank))
            attends = tuple(Attend(tuple(queries), tuple(keys), slices) for (queries, keys), slices in calls)
            steps.append(Step(tuple(moves), ((),) * rank + (attends,)))
        return short._replace(plan=replace(self.plan, steps=tuple(steps)), joined=frozenset(joined))


class _Parts:
    """The steps of every rank as rows of three integers.

    A row is a block that is sent, received or attended to: a code of this role and of the block's shape, the distance
    to the row in which the block's home came last, and the number of equal blocks that it represents. A kernel call is
    a row as well, in front of its blocks.

    Attributes:
        joined: indexed by rank, whether a row represents several blocks.
    """

    def __init__(self, plan: Plan, workload: Workload, takes: KernelSupport) -> None:
        n, num_steps = plan.n, len(plan.steps)
        moves = list(chain.from_iterable(step.moves for step in plan.steps))
        calls_of = list(chain.from_iterable(step.attends for step in plan.steps))
        calls = list(chain.from_iterable(calls_of))
        queries, keys, slices = (list(map(itemgetter(i), calls)) for i in range(3))
        blocks = list(map(itemgetter(0), moves))
        blocks += chain.from_iterable(chain.from_iterable(zip(queries, keys, strict=True)))
        self._things = [*blocks, *calls]
        # All rows: who sends, receives, calls and attends to what, in which step. Then sorted by rank and step.
        sent = np.arange(len(moves))
        sizes = np.array([list(map(len, queries)), list(map(len, keys))], int).sum(0) + 1
        is_call = np.zeros(sizes.sum(), bool)
        is_call[sizes.cumsum() - sizes] = True
        called = np.where(is_call, len(blocks) + is_call.cumsum(), len(moves) + (~is_call).cumsum()) - 1
        things = np.concatenate((sent, sent, called))
        roles = np.repeat((SENT, RECEIVED, ATTENDED), (len(sent), len(sent), len(called)))
        steps = np.repeat(np.arange(num_steps), [len(step.moves) for step in plan.steps])
        ends = (np.fromiter(map(itemgetter(end), moves), int, len(moves)) for end in (1, 2))
        calling = np.repeat(np.repeat(np.arange(n * num_steps), list(map(len, calls_of))), sizes)
        steps, ranks = np.divmod(np.concatenate((*(n * steps + end for end in ends), calling)), n)
        small = np.min_scalar_type(max(n, num_steps))  # small integers sort faster
        order = np.lexsort((steps.astype(small), ranks.astype(small)))
        things, roles, ranks, at = things[order], roles[order], ranks[order], (ranks * num_steps + steps)[order]
        is_call = things >= len(blocks)
        roles[is_call] = CALL
        # The number of the block's shape or of the call's slices, home and origin.
        objects, which = _distinct(blocks)
        shapes, of_objects = _number(map(itemgetter(0, 2, 3, 5), objects))
        columns = of_objects, list(map(itemgetter(1), objects)), list(map(itemgetter(4), objects))
        of_blocks = np.array(columns, np.int32).T.take(which, 0)
        objects_of_calls, which = _distinct(slices)
        of_calls = np.full((len(calls), 3), -1, np.int32)
        slices, of_objects = _number(objects_of_calls)
        of_calls[:, 0] = np.array(of_objects, np.int32).take(which)
        numbers, homes, origins = np.concatenate((of_blocks, of_calls)).take(things, 0).T
        codes = 8 * numbers + 2 * roles + (origins == ranks)
        # The distance of each row to the one in which its home came last.
        is_own, is_other = homes == ranks, (homes != ranks) & ~is_call
        before, since = distances(homes, ranks, is_call)
        # The rows in which ranks that exchange heads are equal.
        self.exchanges_heads = any(heads.parts > 1 for *_, heads in shapes)
        if self.exchanges_heads:
            rows = PlanRows(at, ranks, roles, numbers, homes, origins, shapes, slices)
            self._equal_rows = equal_rows(rows, workload, takes, plan.backward)
        # Which rows join the one before them. Results do only if their send memory is contiguous; those for this rank
        # do not, since they are merged one after the other.
        numbers[is_call] = 0
        spans, results, unpadded = _about(shapes, workload)
        to_send = (origins == ranks) & unpadded[numbers]
        joins = (is_own & (roles == SENT)) | (is_other & (~results[numbers] | to_send))
        unlike = np.flatnonzero((since > 0) & (spans[numbers] != spans[numbers[before]]))
        joins[unlike] = joins[before[unlike]] = False
        joins[1:] &= joins[:-1]
        joins[:1] = False
        for each in (at, codes, since):
            joins[1:] &= each[1:] == each[:-1]
        begins = _begins(joins, before, np.flatnonzero(since > 0))
        first = np.flatnonzero(begins)
        places = begins.cumsum() - 1
        since = np.where(since[first] > 0, places[first] - places[before[first]], since[first])
        times = np.where(is_own[first], 1, np.diff(first, append=len(things)))
        self._rows = np.column_stack((codes[first], since, times)).astype(np.int32)
        self._numbers = things[first]
        self._equal_ends = ends_of = np.append(0, np.bincount(at, minlength=n * num_steps).cumsum())
        self._ends = np.searchsorted(first, ends_of)
        self.joined = np.diff(self._ends[::num_steps]) < np.diff(ends_of[::num_steps])
        self._num_steps = num_steps

    def of(self, rank: int) -> Iterator[bytes]:
        """Yield the rows of each step of a rank, as bytes."""
        return self._bytes(self._rows, self._ends, rank)

    def equal(self, rank: int) -> Iterator[bytes]:
        """Yield the same of `equal_rows`."""
        return (b"equal" + rows for rows in self._bytes(self._equal_rows, self._equal_ends, rank))

    def _bytes(self, rows: Ints, ends: NDArray[np.int_], rank: int) -> Iterator[bytes]:
        ends = ends[rank * self._num_steps : (rank + 1) * self._num_steps + 1]
        whole = rows[ends[0] : ends[-1]].tobytes()
        for start, stop in pairwise((rows.strides[0] * (ends - ends[0])).tolist()):
            yield whole[start:stop]

    def rows(self, rank: int, t: int) -> Iterator[tuple[int, Block | Attend, int, int]]:
        """Yield the rows of a step: role, block or call, distance and number of blocks."""
        start, stop = self._ends[rank * self._num_steps + t :][:2]
        codes, since, times = self._rows[start:stop].T.tolist()
        for code, number, *rest in zip(codes, self._numbers[start:stop].tolist(), since, times, strict=True):
            yield code // 2 % 4, self._things[number], *rest


def _distinct(things: Sequence[T]) -> tuple[list[T], NDArray[np.int_]]:
    """Return the distinct objects, and which of them each thing is. Plans share most of their objects."""
    ids = np.fromiter(map(id, things), np.int64, len(things))
    _, first, places = np.unique(ids, return_index=True, return_inverse=True)
    return [things[i] for i in first.tolist()], places


def _number(things: Iterable[T]) -> tuple[list[T], list[int]]:
    """Return the distinct values of things, and which of them each thing is."""
    numbers: dict[T, int] = {}
    column = [numbers.setdefault(each, len(numbers)) for each in things]
    return list(numbers), column


def _about(shapes: Sequence[tuple[Kind, int, int, Heads]], workload: Workload) -> tuple[Ints, Bools, Bools]:
    """Return for each shape the number of its slots and heads, whether it is a result, and whether send memory holds
    it without padding."""
    _, spans = _number(shape[1:] for shape in shapes)
    unpadded = [
        all(size * (stop - start) % ALIGNMENT == 0 for size in workload.field_bytes(kind, heads))
        for kind, start, stop, heads in shapes
    ]
    return np.array(spans, np.int32), np.array([kind in RESULTS for kind, *_ in shapes], bool), np.array(unpadded, bool)


def _begins(joins: Bools, before: NDArray[np.int_], again: NDArray[np.int_]) -> Bools:
    """Return which rows begin a joined block. Blocks stay joined only if they are joined wherever they occur.

    Args:
        joins: whether a row is like the one before it.
        before: the row in which the home of each row came last.
        again: the rows that have such an earlier row.
    """
    begins = np.append(~joins, True)
    several = ~(begins[:-1] & begins[1:])
    again = again[several[again] | several[before[again]]]
    then = before[again]
    while True:
        found = begins.copy()
        for place in (0, 1):
            begins[again + place] |= begins[then + place]
            begins[then + place] |= begins[again + place]
        if (begins == found).all():
            break
    return begins[:-1]


def _kept(names: Sequence[int]) -> tuple[list[int], tuple[Cut, ...]]:
    """Return the steps that a short plan keeps, and its cuts in the numbers of these steps."""
    kept: list[int] = []
    cuts: list[Cut] = []
    t = 0
    while t < len(names):
        period = next((p for p in range(1, _LONGEST + 1) if names[t : t + 1] == names[t + p : t + p + 1]), 0)
        stop = t + period
        while period and stop < len(names) and names[stop] == names[stop - period]:
            stop += 1
        unit = _UNIT * period
        times = _REUSE * (((stop - t - 2 * _EDGE * period) // unit - 2) // _REUSE) if period else 0
        if times > 0:
            first = len(kept) + _EDGE * period
            cuts.append(Cut(first, first + unit, times))
            kept += range(t, t + _EDGE * period + 2 * unit)
            t += _EDGE * period + (2 + times) * unit
        else:
            now, t = t, max(t + 1, stop - _LONGEST)
            kept += range(now, t)
    return kept, tuple(cuts)
