"""What one rank does in a pass: operations over rows of memory. `record` writes it, the executor replays it.

The parts of a result wait in a `Sum` until several can be merged in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, TypeVar

from .kernel_calls import KernelCall
from .key_copies import Span
from .plan import ALL_HEADS, Block, Heads, Kind
from .send_layout import SendLayout
from .slices import merge_spans
from .workload import Workload


class Place(StrEnum):
    """Where memory is. Brackets name what `Memory.number` counts there."""

    OWN = "own"  # this rank's own tensors
    HELD = "held"  # blocks of other ranks, and gathered rows [slot; -1: backward needs it, so runs do not share it]
    SENT = "sent"  # what this rank sends [region]
    PEER = "peer"  # what a peer sends, read in its memory [receive of the step]
    CALL = "call"  # the output of a kernel call, or the sum of its copies
    SUM = "sum"  # a result that is being merged, in the precision of sums
    RESULT = "result"  # a result in the precision of the inputs
    KEPT = "kept"  # what forward has kept for backward [entry]


@dataclass(eq=False, slots=True)
class Memory:
    """`tokens` rows of one kind with the heads `heads`. Compared by identity."""

    place: Place
    kind: Kind
    tokens: int
    heads: Heads = ALL_HEADS
    number: int = -1

    @property
    def is_kept(self) -> bool:
        """Whether it is held for backward."""
        return self.place is Place.HELD and self.number < 0

    def rows(self, start: int = 0, stop: int = -1, heads: Heads | None = None) -> Rows:
        return Rows(self, start, self.tokens if stop < 0 else stop, self.heads if heads is None else heads)


class Rows(NamedTuple):
    """Rows `start..stop-1` of memory, `heads` of its heads."""

    memory: Memory
    start: int
    stop: int
    heads: Heads

    @property
    def kind(self) -> Kind:
        return self.memory.kind

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> Rows:
        """Return rows `start..stop-1` of these."""
        return Rows(self.memory, self.start + start, self.start + stop, self.heads)


class Part(NamedTuple):
    """Rows of a partial result, which begin at row `start` of the merged result."""

    rows: Rows
    start: int


class Copy(NamedTuple):
    """Copies that are made together, as pairs (destination, source)."""

    pairs: tuple[tuple[Rows, Rows], ...]


class Compute(NamedTuple):
    """A kernel call. The rows of `call` count from the first row of `queries` and of `keys`.

    outputs: OUT, or DKV and DQ. homes: the ranks that own the keys. kept: in backward, the q, out and lse that forward
    has kept for the queries; `queries` are then the gradient of out.
    """

    outputs: tuple[Memory, ...]
    queries: Rows
    keys: Rows
    call: KernelCall
    homes: tuple[int, ...]
    kept: Rows | None = None


class Merge(NamedTuple):
    """A merge of partial results: outputs by their log-sum-exp, gradients by addition.

    Rows that no part covers become (0, -inf) or 0. A sum that is extended is the first part itself. Gradients of copied
    keys are merged into a `Place.CALL`: any number of parts, which are all of a kernel call's output in its order.
    """

    into: Rows
    parts: tuple[Part, ...]


class Send(NamedTuple):
    """The start of a step's messages, which overlap what follows."""

    step: int


class Wait(NamedTuple):
    """The wait until a step's messages are in memory."""

    step: int


class Acquire(NamedTuple):
    """The wait until a step's messages are complete in the senders' memory, to be read there up to `Release`."""

    step: int
    peers: tuple[Memory, ...]


class Release(NamedTuple):
    """The note to the senders that the acquired messages have been read."""

    step: int


Op = Copy | Compute | Merge | Send | Wait | Acquire | Release


def rows_read(op: Op) -> Iterator[Rows]:
    """Yield the rows that an operation reads, besides messages."""
    if isinstance(op, Copy):
        yield from (source for _, source in op.pairs)
    elif isinstance(op, Compute):
        yield from (op.queries, op.keys, *(() if op.kept is None else (op.kept,)))
    elif isinstance(op, Merge):
        yield from (part.rows for part in op.parts)


def rows_written(op: Op) -> Iterator[Rows]:
    """Yield the rows that an operation writes, besides messages."""
    if isinstance(op, Copy):
        yield from (into for into, _ in op.pairs)
    elif isinstance(op, Merge):
        yield op.into
    elif isinstance(op, Compute):
        yield from (memory.rows() for memory in op.outputs)


class Receive(NamedTuple):
    """A block from `peer`, received into rows or, if `into` is None, read in the peer's memory.

    spans: (offset, bytes) in the peer's send memory, one pair per field; empty if messages are sent.
    """

    block: Block
    peer: int
    into: Rows | None
    spans: tuple[tuple[int, int], ...]


class Slot(NamedTuple):
    """Memory of one kind, with one of `parts` equal parts of the heads, that holds one thing after the other."""

    kind: Kind
    parts: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Recording:
    """A rank's whole forward or backward pass. Recordings compare by identity.

    after: for each step that sends, the operation behind which its messages start (-1: the beginning): they send
    what it has written or overwrite what it has read.
    """

    rank: int
    num_tokens: int  # queries of this rank
    backward: bool
    ops: tuple[Op, ...]
    after: dict[int, int]
    slots: tuple[Slot, ...]
    sends: SendLayout
    receives: tuple[tuple[Receive, ...], ...]  # indexed by step
    passed: tuple[tuple[Rows, ...], ...]  # indexed by step: the rows of its messages that are passed on, in their order
    kept: tuple[tuple[Rows, ...], ...]  # what forward keeps for backward: queries with their out, or keys
    own: dict[Kind, Rows]  # this rank's results at the end

    @cached_property
    def reads_own(self) -> frozenset[Kind]:
        """The kinds of this rank's own tensors that the pass reads."""
        read = [rows for op in self.ops for rows in rows_read(op)] + [rows for entry in self.kept for rows in entry]
        return frozenset(rows.kind for rows in read if rows.memory.place is Place.OWN)

    @cached_property
    def kept_memory(self) -> tuple[Memory, ...]:
        """Held memory that every run allocates anew, because backward needs the content."""
        received = [each.into for receives in self.receives for each in receives if each.into is not None]
        written = [*received, *(rows for op in self.ops for rows in rows_written(op))]
        return tuple(dict.fromkeys(rows.memory for rows in written if rows.memory.is_kept))

    @cached_property
    def calls(self) -> tuple[Compute, ...]:
        return tuple(op for op in self.ops if isinstance(op, Compute))


def assign_slots(
    ops: Sequence[Op],
    arriving: Sequence[Sequence[Memory]],
    sent: Sequence[Sequence[Memory]],
    passed: Sequence[Sequence[Rows]],
) -> tuple[dict[int, int], tuple[Slot, ...]]:
    """Give held memory slots, as its `number`. They are used again after the last operation on what they hold.

    Return for each step that sends the operation behind which its messages start (-1: the beginning), and the slots.

    arriving, sent, passed: indexed by step, the memory that its messages fill and that they are sent from, and the rows
        that they pass on.
    """
    first: dict[Memory, int] = {}
    last: dict[Memory, int] = {}
    written: dict[Memory, int] = {}  # the last operation that writes it
    filled: dict[Memory, int] = {}  # the step whose messages fill it
    after: dict[int, int] = {}
    for i, op in enumerate(ops):
        touched = [rows.memory for rows in (*rows_read(op), *rows_written(op))]
        if isinstance(op, Send | Wait):
            moved = [rows.memory for rows in passed[op.step]]
            touched += [*arriving[op.step], *moved]
            if isinstance(op, Send):
                filled |= dict.fromkeys(arriving[op.step], op.step)
                after[op.step] = max((written.get(memory, -1) for memory in (*sent[op.step], *moved)), default=-1)
        written |= dict.fromkeys((rows.memory for rows in rows_written(op)), i)
        for memory in touched:
            first.setdefault(memory, i)
            last[memory] = i
    slots: list[Slot] = []
    busy: list[int] = []  # until which operation each is in use
    for memory, start in first.items():
        if memory.place is not Place.HELD or memory.number < 0:
            continue
        kind = memory.kind, memory.heads.parts
        free = [(until, i) for i, until in enumerate(busy) if until < start and slots[i][:2] == kind]
        if not free:
            free = [(-1, len(slots))]
            slots.append(Slot(*kind, 0))
            busy.append(-1)
        until, number = min(free)  # free for longest, to wait the least
        memory.number, busy[number] = number, last[memory]
        slots[number] = Slot(*kind, max(slots[number].tokens, memory.tokens))
        if memory in filled:
            after[filled[memory]] = max(after[filled[memory]], until)
    return after, tuple(slots)


MAX_PARTIALS = 4
"""The most partial results that one kernel merges. Later ones are merged with what it has written."""
_GAP = 1023
"""The most rows between segments of a kernel call whose results are one part. A part costs more than these rows."""


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


_Gathered = TypeVar("_Gathered", Block, Rows, Span)


def by_block(blocks: Sequence[_Gathered], start: int, stop: int) -> Iterator[tuple[_Gathered, int, int, int]]:
    """Split the gathered rows `start..stop-1` by block, by rows of memory, or by span of keys; yield each with its rows
    and the first of its slots, of its rows in that memory, or of its keys."""
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
        first = spans[0][0]
        for start, stop in merge_spans(spans, _GAP):
            yield Part(memory.rows(start - first, stop - first), start + (at if keys else 0))
