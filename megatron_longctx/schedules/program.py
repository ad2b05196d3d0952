"""The program of one rank: a plan with every decision made, in integers alone.

Where blocks lie in buffers and in every rank's send memory, which kernel calls are made over which rows, what is merged
when: `lower` decides it once. The executor follows it; simulation, memory model, drawings and counts read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from .kernel_calls import KernelCall
from .plan import ALL_HEADS, Block, Heads, Kind


class Space(StrEnum):
    """Where rows lie. What `Rows.number` numbers is in brackets."""

    OWN = "own"  # in this rank's own tensors
    BUFFER = "buffer"  # of other ranks' blocks, and of gathered rows [buffer]
    SENT = "sent"  # in send memory [region]
    PEER = "peer"  # in a peer's send memory [receive of the step]
    CALL = "call"  # in what a kernel call gives [call]
    TOTAL = "total"  # in an accumulator [total]
    RESULT = "result"  # in a result, in the precision of the inputs [result]
    KEPT = "kept"  # in what forward has kept [number]


class Rows(NamedTuple):
    """Rows `start..stop-1` of a kind. `heads` are the ones meant, `held` the ones that lie there."""

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


class Copy(NamedTuple):
    """Copies made together: (into, source)."""

    pairs: tuple[tuple[Rows, Rows], ...]


class Mark(NamedTuple):
    """What was issued so far is done: messages wait for it."""

    number: int


class Send(NamedTuple):
    """Start a step's messages, once mark `after` is reached (-1: the beginning), beside what follows."""

    step: int
    after: int


class Wait(NamedTuple):
    """A step's messages are in their buffers."""

    step: int


class Acquire(NamedTuple):
    """A step's messages are complete where the senders have them: nothing is computed meanwhile, so that what follows
    reads them there, until `Release`."""

    step: int


class Release(NamedTuple):
    """What was acquired has been read."""

    step: int


class Compute(NamedTuple):
    """A kernel call. Rows of `call` count from the first of `queries` and of `keys`.

    homes: the ranks whose keys they are. kept: in backward, where forward has kept q, out and lse of the queries; then
    `queries` are the gradient of out.
    """

    number: int
    queries: Rows
    keys: Rows
    call: KernelCall
    homes: tuple[int, ...]
    kept: Rows | None = None


class Part(NamedTuple):
    """Rows that are part of a result, from its row `start` on."""

    rows: Rows
    start: int


class Merge(NamedTuple):
    """Bring partial results together: outputs by their log-sum-exp, gradients by adding. Rows that no part covers
    become (0, -inf), or 0. What a total holds already is its first part."""

    into: Rows
    parts: tuple[Part, ...]


Op = Copy | Mark | Send | Wait | Acquire | Release | Compute | Merge


class Buffer(NamedTuple):
    """Memory for `tokens` rows of one kind, of one of `parts` parts of the heads. kept: it is not shared between runs,
    since backward needs what lies there."""

    kind: Kind
    tokens: int
    parts: int = 1
    kept: bool = False

    @property
    def heads(self) -> Heads:
        """One of these parts."""
        return Heads(0, self.parts)


class Region(NamedTuple):
    """Rows of send memory. By field, in bytes: offsets, where it begins; sizes, of a row."""

    kind: Kind
    heads: Heads
    tokens: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def spans(self, start: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of some rows, by field."""
        return tuple((at + start * size, tokens * size) for at, size in zip(self.offsets, self.sizes, strict=True))


class Message(NamedTuple):
    """A block for `peer`, from row `start` of a region of send memory on. passed: it has come from another rank, and is
    put there when it is sent; without a region it is sent from its buffer."""

    block: Block
    peer: int
    region: int
    start: int
    passed: bool


@dataclass(frozen=True)
class SendLayout:
    """Where all that a rank sends lies in its send memory.

    published: by step, the regions of this rank's own rows that it is the first to send, with these rows. awaits: by
    step, earlier ones whose messages must have been read before it starts, since their memory is used again.
    """

    regions: tuple[Region, ...]
    messages: tuple[tuple[Message, ...], ...]
    num_bytes: int
    published: tuple[tuple[tuple[int, tuple[tuple[int, int], ...]], ...], ...]
    results: dict[tuple[Block, int], int]
    """By result and the step that sends it, its region."""
    awaits: dict[int, tuple[int, ...]]


class Receive(NamedTuple):
    """A block from `peer`, into a buffer; without rows it is read where the peer has it. spans: (offset, bytes) of its
    fields in the peer's send memory; empty where this rank cannot read that."""

    block: Block
    peer: int
    into: Rows | None
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's whole pass, forward or backward. Programs are told apart by identity.

    ops: in the order in which they are issued. receives: by step. passed: by step, where what is passed on lies, in the
    order of its messages. totals, results: what accumulators and results are
    of, from row 0 on. kept: what forward keeps for backward, in this order: queries and their out, or keys.
    own: by kind, where this rank's own results are at the end. reads_own: kinds of its own tensors that are read.
    num_tokens: of this rank's queries.
    """

    rank: int
    num_tokens: int
    backward: bool
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    sends: SendLayout
    receives: tuple[tuple[Receive, ...], ...]
    passed: tuple[tuple[Rows, ...], ...]
    totals: tuple[Rows, ...]
    results: tuple[Rows, ...]
    kept: tuple[tuple[Rows, ...], ...]
    own: dict[Kind, Rows]
    reads_own: frozenset[Kind]

    @cached_property
    def calls(self) -> tuple[Compute, ...]:
        return tuple(op for op in self.ops if isinstance(op, Compute))

    @cached_property
    def merges(self) -> tuple[Merge, ...]:
        return tuple(op for op in self.ops if isinstance(op, Merge))

    @property
    def num_steps(self) -> int:
        return len(self.receives)

    @cached_property
    def buffer_names(self) -> tuple[int, ...]:
        """A number for every buffer among its kind, the largest first: a shorter sequence fits a longer one's."""
        seen: dict[tuple[Kind, int], int] = {}
        names = [0] * len(self.buffers)
        for i in sorted(range(len(self.buffers)), key=lambda i: -self.buffers[i].tokens):
            key = self.buffers[i].kind, self.buffers[i].parts
            names[i] = seen.get(key, 0)
            seen[key] = names[i] + 1
        return tuple(names)


def used_marks(ops: Sequence[Op]) -> list[Op]:
    """Without marks that no message waits for."""
    used = {op.after for op in ops if type(op) is Send}
    return [op for op in ops if type(op) is not Mark or op.number in used]


def rows_read(ops: Iterable[Op], kept: Iterable[tuple[Rows, ...]]) -> Iterator[Rows]:
    """Rows that operations read, and what is kept."""
    yield from (rows for each in kept for rows in each)
    for op in ops:
        if isinstance(op, Copy):
            yield from (source for _, source in op.pairs)
        elif isinstance(op, Compute):
            yield from (op.queries, op.keys)
        elif isinstance(op, Merge):
            yield from (part.rows for part in op.parts)
