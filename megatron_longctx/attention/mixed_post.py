"""Messages of one pass over two kinds of links: peers of this host read what is published, others are sent to."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import Exchange, MixedTransport, PeerTransport
from ..schedules import Kind
from .post import DirectPost, PeerPost, Post, outbox_of
from .program import HOME, Program

Messages = list[tuple[Tensor, int]]
RowBytes = Callable[[Kind, int], Sequence[int]]


class Crossing(NamedTuple):
    """Whether a step's messages of one kind have to wait for earlier ones of the other kind."""

    near: bool
    far: bool


@dataclass
class MixedExchange(Exchange):
    """A step's messages within the host and between hosts."""

    near: Exchange = field(default_factory=Exchange)
    far: Exchange = field(default_factory=Exchange)


def post_over(transport: PeerTransport | MixedTransport, program: Program, row_bytes: RowBytes) -> Post:
    """The post of a program over (also) peer memory; made by all ranks together."""
    if isinstance(transport, PeerTransport):
        outbox = outbox_of(program, row_bytes)
        return PeerPost(transport.mailbox(outbox), outbox)
    peers = transport.peers.peers
    outbox = outbox_of(program, row_bytes, peers)
    near = PeerPost(transport.peers.mailbox(outbox), outbox)
    others = {send.peer for step in program.steps for send in step.sends}
    if others.union(receive.peer for step in program.steps for receive in step.receives) <= set(peers):
        return near
    return MixedPost(near, DirectPost(transport.messages), peers, crossings(program, peers))


def crossings(program: Program, peers: Container[int]) -> tuple[Crossing, ...]:
    """By step, what waits for what: each kind runs in order by itself, but a buffer that one kind has filled or sent
    from may be sent from, or filled again, by the other."""
    last: dict[int, set[bool]] = {}  # by slot, who touched it in the last step that did: near, far (True, False)
    found = []
    for step in program.steps:
        touched: dict[int, set[bool]] = {}
        used = [(send.place, send.peer) for send in step.sends] + [(into.place, into.peer) for into in step.receives]
        for place, peer in used:
            if place is not None and place.slot != HOME:
                touched.setdefault(place.slot, set()).add(peer in peers)
        found.append(
            Crossing(
                *(
                    any(near in ways and (not near) in last.get(slot, ()) for slot, ways in touched.items())
                    for near in (True, False)
                )
            )
        )
        last.update(touched)
    return tuple(found)


class MixedPost(Post):
    """Every message by the link that it has.

    Args:
        near, far: carry the messages with `peers`, and with all others.
        peers: the ranks of this host.
        crossings: by step of the program.
    """

    def __init__(self, near: Post, far: Post, peers: Container[int], crossings: Sequence[Crossing]) -> None:
        self._near, self._far, self._peers, self._crossings = near, far, peers, crossings
        self._arrived = Exchange(), Exchange()  # the latest that have something to wait for

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self._near.generation

    def begin(self) -> int:
        self._arrived = Exchange(), Exchange()
        return self._near.begin()

    def join(self) -> None:
        self._near.join()

    def room(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        return self._near.room(name, shape, dtype)

    def joined(self, names: Sequence[Hashable]) -> bool:
        return self._near.joined(names)

    def start(self, step: int, sends: Messages, receives: Messages, after: Sequence[Any]) -> MixedExchange:
        near_sends, far_sends = self._split(sends)
        near_receives, far_receives = self._split(receives)
        crossing = self._crossings[step]
        before_near, before_far = (exchange.arrived for exchange in self._arrived)
        near = self._near.start(
            step, near_sends, near_receives, (*after, before_far) if crossing.near and before_far else after
        )
        far = self._far.start(
            step, far_sends, far_receives, (*after, before_near) if crossing.far and before_near else after
        )
        self._arrived = near if near.arrived else self._arrived[0], far if far.arrived else self._arrived[1]
        return MixedExchange(near=near, far=far)

    def wait(self, exchange: Exchange) -> None:
        assert isinstance(exchange, MixedExchange)
        self._near.wait(exchange.near)
        self._far.wait(exchange.far)

    def _split(self, messages: Messages) -> tuple[Messages, Messages]:
        """Messages with peers and with others, each in their order, which is the same at the other end."""
        near = [message for message in messages if message[1] in self._peers]
        return near, [message for message in messages if message[1] not in self._peers]
