"""Partial results: the rows that kernel calls return, and how a program merges them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .kernel_calls import KernelCall
from .plan import Block, Heads, Kind
from .program import Copy, Merge, Op, Part, Rows, Space
from .workload import Workload

MAX_PARTIALS = 4
"""The most partial results that one kernel merges. Later ones are merged with what it has written."""

_GAP = 1024
"""Rows between segments of a kernel call from which on its results are separate parts. A part costs more than fewer
rows."""


def call_results(call: KernelCall, number: int, at: int, heads: Heads, backward: bool) -> Iterator[Part]:
    """Yield the results of a kernel call, split at long gaps between its segments.

    Their starts count the gathered rows of the `Attend`, where the call's keys begin at row `at`.
    """

    def parts(kind: Kind, spans: Iterable[tuple[int, int]], first: int, offset: int) -> Iterator[Part]:
        for start, stop in _without_gaps(spans):
            rows = Rows(Space.CALL, number, kind, start - first, stop - first, heads, heads)
            yield Part(rows, offset + start)

    if backward:
        yield from parts(Kind.DKV, ((k0, k1) for _, _, k0, k1 in call.segments), call.k_span[0], at)
    queries = ((q0, q1) for q0, q1, _, _ in call.segments)
    yield from parts(Kind.DQ if backward else Kind.OUT, queries, call.q_span[0], 0)


def _without_gaps(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ascending spans with fewer than `_GAP` rows between them."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and start - found[-1][1] < _GAP:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def by_block(blocks: Sequence[Block], start: int, stop: int) -> Iterator[tuple[Block, int, int, int]]:
    """Split the gathered rows `start..stop-1` by block; yield each block with its rows and the first of its slots."""
    at = 0
    for block in blocks:
        low, high = max(start, at), min(stop, at + block.tokens)
        if low < high:
            yield block, low, high, block.start + low - at
        at += block.tokens


class Accumulator:
    """A result whose parts wait until several can be merged in one pass over memory.

    Args:
        into: the rows where the result has to be in the end.
        number: of the accumulator in the program.
        ops: the list that copies and merges are appended to.

    Attributes:
        borrowed: the buffers that hold waiting parts.
    """

    def __init__(self, into: Rows, number: int, workload: Workload, ops: list[Op]) -> None:
        self.into, self.number, self.workload, self.ops = into, number, workload, ops
        self.borrowed: set[int] = set()
        self._parts: list[Part] = []
        self._has_content = False  # whether the accumulator's memory was written
        self._disjoint = True  # whether each waiting part has all rows, and no two have the same head
        self._heads: set[int] = set()  # of the parts, while they are disjoint

    def add(self, part: Part) -> None:
        rows = part.rows
        if self._disjoint:
            heads = self.workload.head_range(rows.kind, rows.heads)
            self._disjoint = rows.tokens == self.into.tokens and self._heads.isdisjoint(heads)
            self._heads.update(heads)
        if len(self._parts) + self._has_content >= MAX_PARTIALS and not self._disjoint:
            self.fold()
        self._parts.append(part)
        if rows.space is Space.BUFFER:
            self.borrowed.add(rows.number)

    def fold(self) -> None:
        """Merge all waiting parts into the accumulator."""
        while self._parts:
            some = self._parts[: MAX_PARTIALS - self._has_content]
            self._parts = self._parts[len(some) :]
            start, stop = 0, self.into.tokens
            if self._has_content:  # other rows stay unchanged
                start, stop = min([at for _, at in some]), max([at + rows.tokens for rows, at in some])
            into = self._rows(start, stop)
            before = [Part(into, 0)] if self._has_content else []
            self.ops.append(Merge(into, (*before, *[Part(rows, at - start) for rows, at in some])))
            self._has_content = True
        self.borrowed.clear()
        self._disjoint = False

    def finish(self) -> Rows:
        """Merge all parts; return the rows of the result: `into`, or a kernel call's output if that is all of it."""
        parts, alone = self._parts, not self._has_content and self._disjoint
        returned = [rows for rows, _ in parts if rows.space is Space.CALL and rows.heads == self.into.heads]
        if alone and len(parts) == len(returned) == 1 and self.into.space is Space.RESULT:
            return returned[0]
        num_heads = len(self.workload.head_range(self.into.kind, self.into.heads))
        if alone and parts and len(self._heads) == num_heads:
            self.ops.append(Copy(tuple((self.into._replace(heads=rows.heads), rows) for rows, _ in parts)))
            return self.into
        if len(parts) + self._has_content > MAX_PARTIALS:
            self.fold()
        before = [Part(self._rows(0, self.into.tokens), 0)] if self._has_content else []
        self.ops.append(Merge(self.into, (*before, *self._parts)))
        return self.into

    def _rows(self, start: int, stop: int) -> Rows:
        return Rows(Space.ACCUMULATOR, self.number, self.into.kind, start, stop, self.into.heads, self.into.heads)
