"""The choice of a transport, and the hybrid one: peer memory within hosts, point-to-point messages between them."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import refuse
from ..plans.plan import NUM_FIELDS
from ..plans.recording import Memory as HeldMemory
from ..plans.recording import Recording
from .collectives import PeerMemoryError
from .p2p import Channel, DirectChannel, Exchange, Memory, P2PTransport, Transport
from .peer import PeerTransport, SymmetricExchange
from .symmetric import find_hosts

logger = logging.getLogger(__name__)

TRANSPORTS = "auto", "peer", "p2p"


def choose_transport(
    name: str, group: dist.ProcessGroup, device: torch.device, growth: float = 1.0, key: str = "transport"
) -> Transport:
    """Return the transport of `group`, of the same kind on all ranks. Collective.

    Args:
        name: `peer` for peer memory, `p2p` for point-to-point messages, or `auto` for peer memory between all GPUs that
            can read each other's memory and point-to-point messages otherwise, which may mix the two
            (`HybridTransport`). If it does not use peer memory alone, rank 0 logs the reason.
        growth: of peer memory, see `PeerTransport`.
        key: what `name` is called where it comes from, for messages.

    Raises:
        ValueError: an unknown name, or `peer` where peer memory is not available.
    """
    if name not in TRANSPORTS:
        raise refuse(key, name, "one of " + ", ".join(TRANSPORTS), f"Set {key} to one of these.")
    if name == "p2p" or (name == "auto" and device.type != "cuda"):
        return P2PTransport(group, device)
    hosts = find_hosts(group, device)
    reason = hosts.reason
    try:
        if reason is None:
            return PeerTransport(group, device, growth=growth, key=key)
        if name == "auto" and hosts.has_peers:
            transport = HybridTransport(PeerTransport(group, device, hosts, growth, key))
            if dist.get_rank(group) == 0:
                logger.info(
                    "attention's messages use peer memory within hosts (ranks %s), and go point to point between "
                    "them: %s", hosts, reason,
                )  # fmt: skip
            return transport
    except PeerMemoryError as error:  # raised by all ranks alike
        reason = str(error).rstrip(".")
    if name == "peer":
        raise ValueError(
            f"{key}=peer: expected GPUs that can read each other's memory, but {reason}. Choose auto or p2p."
        )
    if dist.get_rank(group) == 0:
        logger.warning("attention's messages go point to point, not through peer memory: %s", reason)
    return P2PTransport(group, device)


class HybridTransport(Transport):
    """Sends each message over the peer or the point-to-point transport, depending on its link.

    Args:
        peer: the transport among ranks that can read each other's memory. All ranks of its group construct both
            together.
    """

    name = "hybrid"

    def __init__(self, peer: PeerTransport) -> None:
        super().__init__(peer.group, peer.device)
        self.peer, self.p2p, self.hosts = peer, P2PTransport(peer.group, peer.device), peer.hosts

    def channel(self, recording: Recording, num_bytes: int, memory: Memory) -> HybridChannel:
        peers, peer = self.peer.peers, self.peer.channel(recording, num_bytes, memory)
        # A rank that is alone on its host has no memory that peers read.
        send_memory = (lambda: memory(recording.sends.num_bytes)) if len(peers) == 1 else peer.memory
        return HybridChannel(peer, DirectChannel(self.p2p, recording, send_memory, peers), recording, peers)

    def abort(self, error: BaseException) -> None:
        self.peer.abort(error)


class CrossWaits(NamedTuple):
    """Whether the peer messages of a step wait for earlier point-to-point ones, and vice versa."""

    peer: bool
    p2p: bool


def cross_waits(recording: Recording, peers: Container[int]) -> tuple[CrossWaits, ...]:
    """Return which messages of each step wait for those of the other kind.

    Messages of one kind run in order. But memory that a message of one kind has filled or been sent from may next be
    sent or filled by the other kind.
    """
    last: dict[int | HeldMemory, set[bool]] = {}  # the kinds (is peer) that used a slot in the last step that used it
    result = []
    for t, receives in enumerate(recording.receives):
        kinds: dict[int | HeldMemory, set[bool]] = {}
        passed = [message for message in recording.sends.messages[t] if message.passed]
        used = [(rows, message.peer) for message, rows in zip(passed, recording.passed[t], strict=True)]
        used += [(each.into, each.peer) for each in receives if each.into is not None]
        for rows, rank in used:
            memory = rows.memory if rows.memory.is_kept else rows.memory.number  # no other uses what is kept
            kinds.setdefault(memory, set()).add(rank in peers)
        uses = [(now, last.get(memory, set())) for memory, now in kinds.items()]
        peer = any(True in now and False in before for now, before in uses)
        p2p = any(False in now and True in before for now, before in uses)
        result.append(CrossWaits(peer, p2p))
        last.update(kinds)
    return tuple(result)


class HybridChannel:
    """Carries messages with `peers`, the ranks of this host, over one channel, and all others over another."""

    def __init__(self, peer: SymmetricExchange, p2p: Channel, recording: Recording, peers: Container[int]) -> None:
        self._peer, self._p2p, self._waits = peer, p2p, cross_waits(recording, peers)
        self._passed = [
            [m.peer in peers for m in messages if m.passed for _ in range(NUM_FIELDS[m.block.kind])]
            for messages in recording.sends.messages
        ]
        self._received = [
            [each.peer in peers for each in receives for _ in range(NUM_FIELDS[each.block.kind])]
            for receives in recording.receives
        ]
        self._arrived: list[Any] = [None, None]  # the latest events of peer and of point-to-point messages

    @property
    def generation(self) -> int:
        return self._peer.generation

    def begin(self) -> int:
        self._arrived = [None, None]
        return self._peer.begin()

    def memory(self) -> Tensor:
        return self._p2p.memory()

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Sequence[Any]) -> Exchange:
        peer_passed, p2p_passed = _split(passed, self._passed[step])
        peer_receives, p2p_receives = _split(receives, self._received[step])
        waits, (peer_arrived, p2p_arrived) = self._waits[step], self._arrived
        after_p2p = (*after, p2p_arrived) if waits.peer and p2p_arrived else after
        after_peer = (*after, peer_arrived) if waits.p2p and peer_arrived else after
        peer = self._peer.start(step, peer_passed, peer_receives, after_p2p)
        p2p = self._p2p.start(step, p2p_passed, p2p_receives, after_peer)
        self._arrived = [peer.arrived or peer_arrived, p2p.arrived or p2p_arrived]
        return Exchange(parts=(peer, p2p))

    def wait(self, exchange: Exchange) -> None:
        peer, p2p = exchange.parts
        self._peer.wait(peer)
        self._p2p.wait(p2p)


def _split(tensors: Sequence[Tensor], is_peer: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
    """Separate the tensors of messages with peers from the others; both keep the order that the other end uses."""
    pairs = list(zip(tensors, is_peer, strict=True))
    return [tensor for tensor, yes in pairs if yes], [tensor for tensor, yes in pairs if not yes]
