"""How a pass hands its messages to the transport: sent from where they lie, or published in memory that peers read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import Exchange, Mailbox, Outbox, OutboxBuilder, P2PTransport, Sent
from ..comm.outbox import aligned
from ..schedules import Block, Kind
from ..schedules.publishing import Batch
from .program import HOME, Program, Send

Fields = tuple[Tensor, ...]
"""The tensors of one kind of block, all with tokens first. KV is one tensor `[t, 2, b, g, d]`."""


class Post(ABC):
    """Messages of one pass. `sends` and `receives` are (tensor, peer) in the order of the plan's moves."""

    generation = 0
    """Counts up when the memory that peers read has moved."""

    @abstractmethod
    def begin(self) -> int:
        """Start the pass on the caller's stream; returns which of its memories it uses."""

    @abstractmethod
    def join(self) -> None:
        """Let the caller's stream wait for all that was started."""

    @abstractmethod
    def room(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Where the tensor of this name has to lie to be sent; None for anywhere."""

    @abstractmethod
    def joined(self, names: Sequence[Hashable]) -> bool:
        """Whether the rooms of these names may be one tensor, in this order."""

    @abstractmethod
    def start(
        self, step: int, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], after: Sequence[Any]
    ) -> Exchange:
        """Start a step's messages once the marks `after` are reached."""

    @abstractmethod
    def wait(self, exchange: Exchange) -> None:
        """Make the caller's stream wait until the messages are in."""

    def meeting(self, step: int) -> Mailbox | None:
        """Where a step's messages may be met and read, in place of `start` and `wait`; None where they may not."""
        return None


class DirectPost(Post):
    """Point-to-point messages; tensors are sent from where they lie."""

    def __init__(self, transport: P2PTransport) -> None:
        self._transport = transport

    def begin(self) -> int:
        return 0

    def join(self) -> None:
        pass

    def room(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        return None

    def joined(self, names: Sequence[Hashable]) -> bool:
        return True

    def start(
        self, step: int, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], after: Sequence[Any]
    ) -> Exchange:
        return self._transport.start(sends, receives, after)

    def wait(self, exchange: Exchange) -> None:
        self._transport.wait(exchange)


class PeerPost(Post):
    """Messages that peers read where they were published."""

    def __init__(self, mailbox: Mailbox, outbox: Outbox) -> None:
        self._mailbox = mailbox
        self._passed = [[message.passed for message in messages] for messages in outbox.sends]
        self._regions, self._next = outbox.regions, outbox.adjacent

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self._mailbox.generation

    def begin(self) -> int:
        return self._mailbox.begin()

    def join(self) -> None:
        self._mailbox.join()

    def room(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        return self._mailbox.region(name, shape, dtype) if name in self._regions else None

    def joined(self, names: Sequence[Hashable]) -> bool:
        if not any(name in self._regions for name in names):
            return True
        return all(self._next.get(a) == b for a, b in pairwise(names))

    def start(
        self, step: int, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], after: Sequence[Any]
    ) -> Exchange:
        passed = [tensor for (tensor, _), yes in zip(sends, self._passed[step], strict=True) if yes]
        return self._mailbox.start(step, passed, receives, after)

    def wait(self, exchange: Exchange) -> None:
        self._mailbox.wait(exchange)

    def meeting(self, step: int) -> Mailbox | None:
        return self._mailbox if self._mailbox.meets(step) else None


def outbox_of(
    program: Program, row_bytes: Callable[[Kind, int], Sequence[int]], peers: Container[int] | None = None
) -> Outbox:
    """Where all that a program sends lies; names are those that the executor asks a `Post` for room by.

    Args:
        row_bytes: of a kind and the number of parts its heads are in, the bytes of a token by field.
        peers: the ranks that read it; what goes to others only is left out. None for all.
    """
    builder = OutboxBuilder()
    made = {away.result: t for t, step in enumerate(program.steps) for call in step.calls for away in call.away}
    batches: dict[tuple[int, bool], list[tuple[Hashable, int]]] = {}  # by (step, passed on)
    written: dict[tuple[int, bool], int] = {}
    read: list[list[tuple[Send, list[_Region]]]] = [
        [
            (send, _regions(program, send, (t, j), row_bytes))
            for j, send in enumerate(step.sends)
            if peers is None or send.peer in peers
        ]
        for t, step in enumerate(program.steps)
    ]
    own = {
        region.name: len(program.published(send.place.kind)) * region.row
        for messages in read
        for send, regions in messages
        if send.place is not None and send.place.slot == HOME
        for region in regions
    }
    for name in sorted(own, key=_neighbours):
        builder.region(name, own[name])
    for t, messages in enumerate(read):
        for send, regions in sorted(messages, key=lambda message: _order(message[0].block)):
            if send.place is not None and send.place.slot == HOME:
                continue
            key = t, send.place is not None
            batches.setdefault(key, []).extend((region.name, region.tokens * region.row) for region in regions)
            written[key] = min(written.get(key, t), t if send.place is not None else made[send.result])
    builder.passing(
        [
            (
                Batch(t, written[t, passed], sum(aligned(size) for _, size in regions), passed),
                sorted(regions, key=_number_of_field),
            )
            for (t, passed), regions in batches.items()
        ]
    )
    return builder.build(
        tuple(
            tuple(
                Sent(
                    send.peer,
                    builder.regions[region.name] + region.start * region.row,
                    region.tokens * region.row,
                    passed=send.place is not None and send.place.slot != HOME,
                )
                for send, regions in messages
                for region in regions
            )
            for messages in read
        )
    )


def _neighbours(name: Any) -> tuple[Any, ...]:
    """Parts of the heads of a field side by side, so that they are copied there together."""
    _, kind, heads, i = name
    return kind, heads.parts, i, heads.part


def _order(block: Block) -> tuple[Any, ...]:
    """As a call computes them."""
    return block.kind, block.heads, block.home, block.start


def _number_of_field(region: tuple[Any, int]) -> int:
    """The results of a step field by field, so that a call's are copied there together."""
    name, _ = region
    return int(name[-1])


class _Region(NamedTuple):
    """Where a field of a message is read from: `tokens` rows of `row` bytes of a region, from row `start` on."""

    name: Hashable
    start: int
    tokens: int
    row: int


def _regions(
    program: Program, send: Send, number: tuple[int, int], row_bytes: Callable[[Kind, int], Sequence[int]]
) -> list[_Region]:
    """By field; `number`: the message's step, and its place among the sends."""
    if send.place is None:
        block = program.outgoing[send.result]
        rows = row_bytes(block.kind, block.heads.parts)
        return [_Region(("result", send.result, i), 0, block.tokens, row) for i, row in enumerate(rows)]
    kind, slot, start, stop, heads, _ = send.place
    rows = row_bytes(kind, heads.parts)
    if slot == HOME:
        first = program.published(kind).start
        return [_Region(("home", kind, heads, i), start - first, stop - start, row) for i, row in enumerate(rows)]
    return [_Region(("passed", *number, i), 0, stop - start, row) for i, row in enumerate(rows)]
