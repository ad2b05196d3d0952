"""How a program brings partial results together: parts wait until several can be merged in one pass over memory."""

from __future__ import annotations

from .cost import Workload
from .program import Copy, Merge, Op, Part, Rows, Space

MOST_PARTIALS = 4
"""Partial results that one kernel brings together; later ones join what it has written."""


class Total:
    """A result that is brought together: parts wait until several can be merged in one pass over memory.

    Args:
        into: where it is to be at the end.
        borrowed parts lie in buffers that are received into again.
    """

    def __init__(self, into: Rows, number: int, workload: Workload) -> None:
        self.into, self.number, self.workload = into, number, workload
        self.parts: list[Part] = []
        self.borrowed: set[int] = set()
        self.exists = False  # whether the accumulator holds anything
        self._apart = True  # each covers all rows, and no two of them the same head
        self._covered: set[int] = set()

    def add(self, part: Part, ops: list[Op]) -> None:
        rows = part.rows
        if self._apart:
            heads = self.workload.head_range(rows.kind, rows.heads)
            self._apart = rows.tokens == self.into.tokens and self._covered.isdisjoint(heads)
            self._covered.update(heads)
        if len(self.parts) + self.exists >= MOST_PARTIALS and not self._apart:
            self.fold(ops)
        self.parts.append(part)
        if rows.space is Space.BUFFER:
            self.borrowed.add(rows.number)

    def fold(self, ops: list[Op]) -> None:
        """Bring all together in the accumulator."""
        while self.parts:
            some = self.parts[: MOST_PARTIALS - self.exists]
            self.parts = self.parts[len(some) :]
            start, stop = 0, self.into.tokens
            if self.exists:  # rows that get nothing stay as they are
                start, stop = min([at for _, at in some]), max([at + rows.tokens for rows, at in some])
            total = self._total(start, stop)
            before = [Part(total, 0)] if self.exists else []
            ops.append(Merge(total, (*before, *[Part(rows, at - start) for rows, at in some])))
            self.exists = True
        self.borrowed.clear()
        self._apart = False

    def finish(self, ops: list[Op]) -> Rows:
        """Bring it to its place; gives where it is, which may be a kernel's own result."""
        only = self.parts[0].rows if len(self.parts) == 1 and not self.exists else None
        whole = only is not None and self._apart and only.heads == self.into.heads
        if only is not None and whole and only.space is Space.CALL and self.into.space is Space.RESULT:
            return only
        every = len(self.workload.head_range(self.into.kind, self.into.heads))
        if self.parts and self._apart and not self.exists and len(self._covered) == every:
            ops.append(Copy(tuple((self.into._replace(heads=part.rows.heads), part.rows) for part in self.parts)))
            return self.into
        if len(self.parts) + self.exists > MOST_PARTIALS:
            self.fold(ops)
        before = [Part(self._total(0, self.into.tokens), 0)] if self.exists else []
        ops.append(Merge(self.into, (*before, *self.parts)))
        return self.into

    def _total(self, start: int, stop: int) -> Rows:
        return Rows(Space.TOTAL, self.number, self.into.kind, start, stop, self.into.heads, self.into.heads)
