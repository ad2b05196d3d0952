"""Partial results: the rows that kernel calls return, and how they are merged."""

from collections.abc import Iterator, Sequence

from .kernel_calls import KernelCall
from .plan import Block, Heads, Kind
from .recording import Copy, Memory, Merge, Op, Part, Place, Rows
from .workload import Workload

MAX_PARTIALS = 4
"""The most partial results that one kernel merges. Later ones are merged with what it has written."""
_GAP = 1024
"""Rows between segments of a kernel call from which on its results are separate parts. A part costs more than fewer
rows."""


class Sum:
    """A result whose parts wait until several can be merged in one pass over memory.

    into: where the result has to be in the end; None for anywhere.
    ops: the list that copies and merges are appended to.
    """

    def __init__(self, kind: Kind, tokens: int, heads: Heads, into: Rows | None, work: Workload, ops: list[Op]) -> None:
        self.into, self.memory, self.ops = into, Memory(Place.SUM, kind, tokens, heads), ops
        self._head_range = work.head_range
        self._parts: list[Part] = []
        self._has_content = False  # whether the sum's memory was written
        self._disjoint = True  # whether each waiting part has all rows, and no two have the same head
        self._heads: set[int] = set()  # of the parts, while they are disjoint

    def add(self, part: Part) -> None:
        rows = part.rows
        if self._disjoint:
            heads = self._head_range(rows.kind, rows.heads)
            self._disjoint = rows.tokens == self.memory.tokens and self._heads.isdisjoint(heads)
            self._heads.update(heads)
        if len(self._parts) + self._has_content >= MAX_PARTIALS and not self._disjoint:
            self.fold()
        self._parts.append(part)

    def holds(self, memories: set[Memory]) -> bool:
        """Whether a part in one of these memories waits."""
        return any(part.rows.memory in memories for part in self._parts)

    def fold(self) -> None:
        """Merge all waiting parts into the sum."""
        while self._parts:
            some = self._parts[: MAX_PARTIALS - self._has_content]
            self._parts = self._parts[len(some) :]
            start, stop = 0, self.memory.tokens
            if self._has_content:  # other rows stay unchanged
                start, stop = min(at for _, at in some), max(at + rows.tokens for rows, at in some)
            into = self.memory.rows(start, stop)
            before = [Part(into, 0)] if self._has_content else []
            self.ops.append(Merge(into, (*before, *[Part(rows, at - start) for rows, at in some])))
            self._has_content = True
        self._disjoint = False

    def finish(self) -> Rows:
        """Merge all parts; return the rows of the result: `into`, or a kernel call's output if that is all of it."""
        parts, alone, heads = self._parts, not self._has_content and self._disjoint, self.memory.heads
        whole = [rows for rows, _ in parts if rows.memory.place is Place.CALL and rows.heads == heads]
        if self.into is None and alone and len(parts) == len(whole) == 1:
            return whole[0]
        into = self.into or Memory(Place.RESULT, self.memory.kind, self.memory.tokens, heads).rows()
        if alone and parts and len(self._heads) == len(self._head_range(self.memory.kind, heads)):
            self.ops.append(Copy(tuple((into._replace(heads=rows.heads), rows) for rows, _ in parts)))
            return into
        if len(parts) + self._has_content > MAX_PARTIALS:
            self.fold()
        before = [Part(self.memory.rows(), 0)] if self._has_content else []
        self.ops.append(Merge(into, (*before, *self._parts)))
        return into


def by_block(blocks: Sequence[Block], start: int, stop: int) -> Iterator[tuple[Block, int, int, int]]:
    """Split the gathered rows `start..stop-1` by block; yield each block with its rows and the first of its slots."""
    at = 0
    for block in blocks:
        low, high = max(start, at), min(stop, at + block.tokens)
        if low < high:
            yield block, low, high, block.start + low - at
        at += block.tokens


def call_results(call: KernelCall, outputs: Sequence[Memory], at: int) -> Iterator[Part]:
    """Yield the results of a kernel call, split at long gaps between its segments.

    Their starts count the gathered rows of the `Attend`, where the call's keys begin at row `at`.
    """
    for memory in outputs:
        keys = memory.kind is Kind.DKV
        spans = [each[2:] if keys else each[:2] for each in call.segments]
        first, joined = spans[0][0], list[tuple[int, int]]()
        for start, stop in spans:
            if joined and start - joined[-1][1] < _GAP:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
        for start, stop in joined:
            yield Part(memory.rows(start - first, stop - first), start + (at if keys else 0))
