"""Peer memory within hosts and point-to-point messages between them, beside each other."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..schedules.plan import NUM_FIELDS
from ..schedules.program import Program
from .channel import Channel
from .p2p import DirectChannel, Exchange, P2PTransport
from .peer import PeerTransport, SymmetricExchange


class HybridTransport:
    """Both transports over the same ranks; a pass sends each message by the one that its link has.

    Args:
        peers: among those that can read each other's memory; all ranks of its group construct both together.
    """

    def __init__(self, peers: PeerTransport) -> None:
        self.peers, self.messages = peers, P2PTransport(peers.group, peers.device)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the ranks that read its memory."""
        return self.peers.hosts

    def channel(self, program: Program, num_bytes: int, memory: Callable[[int], Tensor]) -> Channel:
        """The messages of a program; see `channel.Transport`."""
        near = self.peers.channel(program, num_bytes, memory)
        alone = len(self.peers.peers) == 1  # on its host: there is no memory that peers read
        sent = (lambda: memory(program.sends.num_bytes)) if alone else near.memory
        far = DirectChannel(self.messages, program, sent, self.peers.peers)
        return HybridChannel(near, far, program, self.peers.peers)

    def now(self) -> torch.cuda.Event | None:
        """A mark after all work issued so far by the caller's stream."""
        return self.messages.now()

    def break_off(self, error: BaseException) -> None:
        """As of `PeerTransport`."""
        self.peers.break_off(error)


class Crossing(NamedTuple):
    """Whether a step's messages of one kind have to wait for earlier ones of the other kind."""

    near: bool
    far: bool


def crossings(program: Program, peers: Container[int]) -> tuple[Crossing, ...]:
    """By step, what waits for what: each kind runs in order by itself, but a buffer that one kind has filled or sent
    from may be sent from, or filled again, by the other."""
    last: dict[int, set[bool]] = {}  # by buffer, who touched it in the last step that did: near, far (True, False)
    found = []
    for t, receives in enumerate(program.receives):
        touched: dict[int, set[bool]] = {}
        passed = [message for message in program.sends.messages[t] if message.passed]
        used = [(rows, message.peer) for message, rows in zip(passed, program.passed[t], strict=True)]
        used += [(each.into, each.peer) for each in receives if each.into is not None]
        for rows, peer in used:
            touched.setdefault(rows.number, set()).add(peer in peers)
        found.append(
            Crossing(
                *(
                    any(near in ways and (not near) in last.get(buffer, ()) for buffer, ways in touched.items())
                    for near in (True, False)
                )
            )
        )
        last.update(touched)
    return tuple(found)


@dataclass
class HybridExchange(Exchange):
    """A step's messages within the host and between hosts."""

    near: Exchange = field(default_factory=Exchange)
    far: Exchange = field(default_factory=Exchange)


class HybridChannel:
    """Every message by the link that it has.

    Args:
        near, far: carry the messages with `peers`, and with all others.
        peers: the ranks of this host.
    """

    def __init__(self, near: SymmetricExchange, far: Channel, program: Program, peers: Container[int]) -> None:
        self._near, self._far, self._crossings = near, far, crossings(program, peers)
        self._passed = [
            [m.peer in peers for m in messages if m.passed for _ in range(NUM_FIELDS[m.block.kind])]
            for messages in program.sends.messages
        ]
        self._received = [
            [each.peer in peers for each in some for _ in range(NUM_FIELDS[each.block.kind])]
            for some in program.receives
        ]
        self._arrived = Exchange(), Exchange()  # the latest that have something to wait for

    @property
    def generation(self) -> int:
        return self._near.generation

    def begin(self) -> int:
        self._arrived = Exchange(), Exchange()
        return self._near.begin()

    def memory(self) -> Tensor:
        return self._far.memory()

    def start(
        self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Sequence[Any]
    ) -> HybridExchange:
        near_passed, far_passed = _split(passed, self._passed[step])
        near_receives, far_receives = _split(receives, self._received[step])
        crossing = self._crossings[step]
        before_near, before_far = (exchange.arrived for exchange in self._arrived)
        near = self._near.start(
            step, near_passed, near_receives, (*after, before_far) if crossing.near and before_far else after
        )
        far = self._far.start(
            step, far_passed, far_receives, (*after, before_near) if crossing.far and before_near else after
        )
        self._arrived = near if near.arrived else self._arrived[0], far if far.arrived else self._arrived[1]
        return HybridExchange(near=near, far=far)

    def wait(self, exchange: Exchange) -> None:
        assert isinstance(exchange, HybridExchange)
        self._near.wait(exchange.near)
        self._far.wait(exchange.far)


def _split(tensors: Sequence[Tensor], near: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
    """Those of messages with peers and with others, each in their order, which is the same at the other end."""
    pairs = list(zip(tensors, near, strict=True))
    return [tensor for tensor, yes in pairs if yes], [tensor for tensor, yes in pairs if not yes]
