"""Peer memory within hosts and point-to-point messages between them, beside each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .hosts import Hosts
from .p2p import P2PTransport
from .peer import PeerTransport


class MixedTransport:
    """Both transports over the same ranks; a pass sends each message by the one that its link has.

    Args:
        group: the process group; all its ranks construct the transport together.
        device: this rank's CUDA device.
        hosts: who can read whose memory.
        growth, key: see `PeerTransport`.

    Raises:
        PeerMemoryError: as for `PeerTransport`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        hosts: Hosts,
        growth: float = 1.0,
        key: str = "attention.transport",
    ) -> None:
        self.peers = PeerTransport(group, device, hosts, growth, key)
        self.messages = P2PTransport(group, device)
        self.group, self.device = group, device
        self.rank, self.world = self.messages.rank, self.messages.world

    def now(self) -> torch.cuda.Event | None:
        """A mark after all work issued so far by the caller's stream."""
        return self.messages.now()

    def break_off(self, error: BaseException) -> None:
        """As of `PeerTransport`."""
        self.peers.break_off(error)
