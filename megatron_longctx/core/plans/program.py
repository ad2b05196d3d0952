"""The program of one rank: a lowered plan, in integers alone.

A program lists copies, messages, kernel calls and merges over numbered rows. `lower` makes all of these decisions once:
the executor runs the program, and the simulator, the memory model and the drawings read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from .kernel_calls import KernelCall
from .plan import ALL_HEADS, Block, Heads, Kind


class Space(StrEnum):
    """The memory that rows are stored in. Brackets name what `Rows.number` counts there."""

    OWN = "own"  # this rank's own tensors
    BUFFER = "buffer"  # blocks of other ranks, and gathered rows [buffer]
    SENT = "sent"  # this rank's send memory [region]
    PEER = "peer"  # a peer's send memory [receive of the step]
    CALL = "call"  # the output of a kernel call [call]
    ACCUMULATOR = "accumulator"  # a result that is being merged [accumulator]
    RESULT = "result"  # a result in the precision of the inputs [result]
    KEPT = "kept"  # what forward has kept for backward [number]


class Rows(NamedTuple):
    """Rows `start..stop-1` of one kind: the heads `heads` of memory that holds the heads `held`."""

    space: Space
    number: int
    kind: Kind
    start: int
    stop: int
    heads: Heads = ALL_HEADS
    held: Heads = ALL_HEADS

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> Rows:
        """Return rows `start..stop-1` of these."""
        space, number, kind, first, last, heads, held = self
        if stop - start == last - first:
            return self
        return Rows(space, number, kind, first + start, first + stop, heads, held)


class Copy(NamedTuple):
    """Copies that are made together, as pairs (destination, source)."""

    pairs: tuple[tuple[Rows, Rows], ...]


class Mark(NamedTuple):
    """An event behind all operations so far, for messages to wait for."""

    number: int


class Send(NamedTuple):
    """The start of a step's messages, which wait for mark `after` (-1: for nothing) and overlap what follows."""

    step: int
    after: int


class Wait(NamedTuple):
    """The wait until a step's messages are in their buffers."""

    step: int


class Acquire(NamedTuple):
    """The wait until a step's messages are complete in the senders' memory.

    The operations up to `Release` read them there.
    """

    step: int


class Release(NamedTuple):
    """The note to the senders that the acquired messages have been read."""

    step: int


class Compute(NamedTuple):
    """A kernel call. The rows of `call` count from the first row of `queries` and of `keys`.

    homes: the ranks that own the keys. kept: in backward, the q, out and lse that forward has kept for the queries;
    `queries` are then the gradient of out.
    """

    number: int
    queries: Rows
    keys: Rows
    call: KernelCall
    homes: tuple[int, ...]
    kept: Rows | None = None


class Part(NamedTuple):
    """Rows of a partial result, which begin at row `start` of the merged result."""

    rows: Rows
    start: int


class Merge(NamedTuple):
    """A merge of partial results: outputs by their log-sum-exp, gradients by addition.

    Rows that no part covers become (0, -inf) or 0. An accumulator that is extended is the first part itself.
    """

    into: Rows
    parts: tuple[Part, ...]


Op = Copy | Mark | Send | Wait | Acquire | Release | Compute | Merge


def rows_read(op: Op) -> Iterator[Rows]:
    """Yield the rows that an operation reads; of messages none."""
    if isinstance(op, Copy):
        yield from (source for _, source in op.pairs)
    elif isinstance(op, Compute):
        yield from (op.queries, op.keys)
    elif isinstance(op, Merge):
        yield from (part.rows for part in op.parts)


def rows_written(op: Op) -> Iterator[Rows]:
    """Yield the rows that a copy or a merge writes."""
    if isinstance(op, Copy):
        yield from (into for into, _ in op.pairs)
    elif isinstance(op, Merge):
        yield op.into


class Buffer(NamedTuple):
    """Memory for `tokens` rows of one kind, with one of `parts` equal parts of the heads.

    kept: backward needs the content, so runs do not share the buffer.
    """

    kind: Kind
    tokens: int
    parts: int = 1
    kept: bool = False

    @property
    def heads(self) -> Heads:
        """A part of the heads that is as large as the buffer's."""
        return Heads(0, self.parts)


class Region(NamedTuple):
    """Rows of send memory. Its offsets and its row sizes are in bytes, one per field (`plan.FIELDS`)."""

    kind: Kind
    heads: Heads
    tokens: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def spans(self, start: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """Return (offset, bytes) of `tokens` rows from row `start` on, one pair per field."""
        return tuple((at + start * size, tokens * size) for at, size in zip(self.offsets, self.sizes, strict=True))


class Message(NamedTuple):
    """A block for `peer`, sent from row `start` of a region of send memory on.

    passed: the block comes from another rank. It is copied into its region when it is sent; without a region (-1) it is
    sent directly from its buffer.
    """

    block: Block
    peer: int
    region: int
    start: int
    passed: bool


@dataclass(frozen=True)
class SendLayout:
    """The layout of a rank's send memory, and the messages that are sent from it.

    packing: indexed by step, the copies that fill the regions of own rows which that step is the first to send.
    awaits: keyed by step, the earlier steps whose messages must have been read before it starts, since it reuses their
    memory.
    """

    regions: tuple[Region, ...]
    messages: tuple[tuple[Message, ...], ...]  # indexed by step
    num_bytes: int
    packing: tuple[tuple[tuple[Rows, Rows], ...], ...]
    results: dict[tuple[Block, int], int]  # regions, keyed by result and the step that sends it
    awaits: dict[int, tuple[int, ...]]


class Receive(NamedTuple):
    """A block from `peer`, received into rows of a buffer or, if `into` is None, read in the peer's memory.

    spans: (offset, bytes) in the peer's send memory, one pair per field; empty if this rank cannot read that memory.
    """

    block: Block
    peer: int
    into: Rows | None
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's whole forward or backward pass. Programs compare by identity."""

    rank: int
    num_tokens: int  # queries of this rank
    backward: bool
    ops: tuple[Op, ...]  # in the order of issue
    buffers: tuple[Buffer, ...]
    sends: SendLayout
    receives: tuple[tuple[Receive, ...], ...]  # indexed by step
    passed: tuple[tuple[Rows, ...], ...]  # indexed by step: the rows of its messages that are passed on, in their order
    accumulators: tuple[Rows, ...]  # all rows of each
    results: tuple[Rows, ...]  # all rows of each
    kept: tuple[tuple[Rows, ...], ...]  # what forward keeps for backward: queries with their out, or keys
    own: dict[Kind, Rows]  # this rank's results at the end
    reads_own: frozenset[Kind]  # kinds of this rank's own tensors that the program reads

    @cached_property
    def calls(self) -> tuple[Compute, ...]:
        return tuple(op for op in self.ops if isinstance(op, Compute))

    @cached_property
    def buffer_names(self) -> tuple[int, ...]:
        """The place of every buffer among those of its kind, ordered by size, the largest first.

        Programs share the memory of equal names, so a shorter sequence fits into the buffers of a longer one.
        """
        seen: dict[tuple[Kind, int], int] = {}
        names = [0] * len(self.buffers)
        for i in sorted(range(len(self.buffers)), key=lambda i: -self.buffers[i].tokens):
            key = self.buffers[i].kind, self.buffers[i].parts
            names[i] = seen.get(key, 0)
            seen[key] = names[i] + 1
        return tuple(names)
