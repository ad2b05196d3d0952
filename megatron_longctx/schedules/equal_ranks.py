"""Names of steps by which ranks that exchange heads are recognized as equal, for simulation.

In `ulysses` and within the groups of `usp`, every rank attends to the tokens of all ranks of its group, with its own
part of the heads. What they do differs only in the part, and in where their own blocks stand among those of the others.
A rank's own block is copied where others are received, so its place does not matter among blocks of the same shape that
no kernel call divides. Parts do not matter either, except in a rank's own results: these wait for each other until two
of the same heads come (`accumulators`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .cost import Workload
from .kernel_calls import KernelSupport, kernel_calls
from .mask import Slice
from .plan import RESULTS, Heads, Kind

SENT, RECEIVED, CALL, ATTENDED = range(4)
"""The roles of rows. Blocks that a kernel call attends to follow its row, queries first."""
OWN = -1
"""Marks the rank itself, where other homes have their distance to the row in which they came last (0: never)."""

Ints = NDArray[np.int_]
Bools = NDArray[np.bool_]
Shape = tuple[Kind, int, int, Heads]


def distances(homes: Ints, ranks: Ints, is_call: Bools) -> tuple[Ints, Ints]:
    """Return the earlier row in which each row's home came last on its rank (itself: none), and the distance to it."""
    small = np.min_scalar_type(int(ranks.max(initial=0)))  # small integers sort faster
    others = np.flatnonzero((homes != ranks) & ~is_call)
    others = others[np.lexsort((homes[others].astype(small), ranks[others].astype(small)))]
    again = (homes[others[1:]] == homes[others[:-1]]) & (ranks[others[1:]] == ranks[others[:-1]])
    before = np.arange(len(homes))
    before[others[1:][again]] = others[:-1][again]
    return before, np.where(homes == ranks, OWN, np.arange(len(homes)) - before)


class PlanRows(NamedTuple):
    """The blocks that are sent, received and attended to, and the kernel calls, as rows sorted by rank and step.

    Attributes:
        at: rank * steps + step.
        numbers: of the block's shape in `shapes`, or of the call's slices in `slices`.
        homes, origins: of blocks; -1 for calls.
    """

    at: Ints
    ranks: Ints
    roles: Ints
    numbers: Ints
    homes: Ints
    origins: Ints
    shapes: Sequence[Shape]
    slices: Sequence[tuple[Slice, ...]]

    @property
    def is_call(self) -> Bools:
        found: Bools = self.roles == CALL
        return found

    def by_shape(self, values: Iterable[int]) -> Ints:
        """Return for each block the value of its shape. Those of calls mean nothing."""
        found: Ints = np.fromiter(values, int, len(self.shapes))[np.where(self.is_call, 0, self.numbers)]
        return found

    def is_kind(self, *kinds: Kind) -> Bools:
        found: Bools = ~self.is_call & (self.by_shape(kind in kinds for kind, *_ in self.shapes) == 1)
        return found


def equal_rows(rows: PlanRows, workload: Workload, takes: KernelSupport, backward: bool) -> NDArray[np.int32]:
    """Return `[rows, 3]` integers, which are the same for ranks that are equal."""
    sizes: dict[object, int] = {}  # without the part, since parts of the heads are equal
    size = rows.by_shape(
        sizes.setdefault((kind, start, stop, heads.parts), len(sizes)) for kind, start, stop, heads in rows.shapes
    )
    size = np.where(rows.is_call, rows.numbers, size)
    codes = 8 * size + 2 * rows.roles + (rows.origins == rows.ranks)
    collides = np.zeros(len(codes), int)
    collides[_first_collisions(rows, workload, backward)] = 1
    # Own blocks stand first among equal ones.
    run = _breaks(rows.at, codes) | _divided(rows, takes)
    order = np.lexsort((rows.homes != rows.ranks, run.cumsum()))
    _, since = distances(rows.homes[order], rows.ranks[order], rows.is_call[order])
    return np.column_stack((codes[order], since, collides[order])).astype(np.int32)


def _first_collisions(rows: PlanRows, workload: Workload, backward: bool) -> Ints:
    """Return, for each rank and kind of its own results, the first row that adds heads which are there already."""
    ranges: dict[object, int] = {}
    heads = rows.by_shape(
        ranges.setdefault(workload.head_range(kind, part), len(ranges)) for kind, *_, part in rows.shapes
    )
    of_queries = rows.is_kind(Kind.Q, Kind.OUT, Kind.DQ)
    received, attended = (rows.roles == RECEIVED) & rows.is_kind(*RESULTS), rows.roles == ATTENDED
    own = np.flatnonzero((rows.homes == rows.ranks) & (received | (attended & (of_queries | backward))))
    # What is received in a step is added behind what the step's calls return.
    own = own[np.lexsort((received[own], rows.at[own]))]
    heads, groups = heads[own], 2 * rows.ranks[own] + of_queries[own]
    order = np.lexsort((heads, groups))
    again = order[1:][~_breaks(heads[order], groups[order])[1:]]
    first = np.full(int(groups.max(initial=0)) + 1, len(own))
    np.minimum.at(first, groups[again], again)
    collisions: Ints = own[first[first < len(own)]]
    return collisions


def _divided(rows: PlanRows, takes: KernelSupport) -> Bools:
    """Return which blocks of a call begin, or follow, where its kernel calls divide queries or keys."""
    call, attended, is_query = rows.is_call.cumsum(), rows.roles == ATTENDED, rows.is_kind(Kind.Q)
    stops = np.where(attended, rows.by_shape(stop - start for _, start, stop, _ in rows.shapes), 0).cumsum()
    starts = np.append(0, stops[:-1])
    begins = _breaks(call, is_query)
    base = np.maximum.accumulate(np.where(begins, starts, 0))
    starts, stops = starts - base, stops - base
    far = int(stops.max(initial=0)) + 2  # queries and keys of all slices on one line, each this far from the next
    bounds = set()
    for number, each in enumerate(rows.slices):
        segments = [segment for each_call in kernel_calls(each, takes) for segment in each_call.segments]
        for q_start, q_stop, k_start, k_stop in (*segments, *[one[:4] for one in each]):
            bounds |= {(2 * number + 1) * far + q for q in (q_start, q_stop)}
            bounds |= {2 * number * far + k for k in (k_start, k_stop)}
    line = np.array(sorted(bounds), np.int64)
    first = far * (2 * np.append(0, rows.numbers[rows.is_call])[call] + is_query)
    until, behind = (np.searchsorted(line, first + starts, side) for side in ("left", "right"))
    inside = attended & (np.searchsorted(line, first + stops, "left") > behind)
    divided: Bools = attended & (inside | (behind > until))
    divided[1:] |= inside[:-1]
    return divided


def _breaks(*columns: NDArray[np.generic]) -> Bools:
    """Return which rows differ from the one before in any column."""
    found = np.ones(len(columns[0]), bool)
    found[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return found
