"""How a pass hands its messages to the transport: sent from where they lie, or published in memory that peers read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..comm import Exchange, Mailbox, Outbox, OutboxBuilder, P2PTransport, Sent
from ..schedules import Kind
from .program import HOME, Program

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


def outbox_of(
    program: Program, row_bytes: Callable[[Kind, int], Sequence[int]], peers: Container[int] | None = None
) -> Outbox:
    """Where all that a program sends lies; names are those that the executor asks a `Post` for room by.

    Args:
        row_bytes: of a kind and the number of parts its heads are in, the bytes of a token by field.
        peers: the ranks that read it; what goes to others only is left out. None for all.
    """
    builder = OutboxBuilder()
    sends = []
    for t, step in enumerate(program.steps):
        messages = []
        for j, (_, place, peer, result) in enumerate(step.sends):
            if peers is not None and peer not in peers:
                continue
            if place is None:
                block = program.outgoing[result]
                for i, size in enumerate(row_bytes(block.kind, block.heads.parts)):
                    total = block.tokens * size
                    messages.append(Sent(peer, builder.region(("result", result, i), total), total))
                continue
            for i, size in enumerate(row_bytes(place.kind, place.heads.parts)):
                total = (place.stop - place.start) * size
                if place.slot == HOME:
                    whole = builder.region(("home", place.kind, place.heads, i), program.num_tokens * size)
                    messages.append(Sent(peer, whole + place.start * size, total))
                else:
                    messages.append(Sent(peer, builder.region(("passed", t, j, i), total), total, passed=True))
        sends.append(tuple(messages))
    return builder.build(tuple(sends))
