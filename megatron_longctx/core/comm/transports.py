"""The choice of a transport."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from ..errors import refuse
from .collectives import PeerMemoryError
from .p2p import P2PTransport, Transport
from .peer import PeerTransport
from .symmetric import why_no_peer_memory

logger = logging.getLogger(__name__)

TRANSPORTS = "auto", "peer", "p2p"


def choose_transport(
    name: str, group: dist.ProcessGroup, device: torch.device, growth: float = 1.0, key: str = "transport"
) -> Transport:
    """Return the transport of `group`, of the same kind on all ranks. Collective.

    name: `peer` for peer memory, `p2p` for point-to-point messages, or `auto` for peer memory if all ranks can read
        each other's memory and point-to-point messages otherwise, for which rank 0 logs the reason.
    growth: of peer memory, see `PeerTransport`.
    key: what `name` is called where it comes from, for messages.

    Raises:
        ValueError: an unknown name, or `peer` where peer memory is not available.
    """
    if name not in TRANSPORTS:
        raise refuse(key, name, "one of " + ", ".join(TRANSPORTS), f"Set {key} to one of these.")
    if name == "p2p" or (name == "auto" and device.type != "cuda"):
        return P2PTransport(group, device)
    reason = why_no_peer_memory(group, device)
    if reason is None:
        try:
            return PeerTransport(group, device, growth, key)
        except PeerMemoryError as error:  # raised by all ranks alike
            reason = str(error).rstrip(".")
    if name == "peer":
        raise ValueError(
            f"{key}=peer: expected GPUs that can read each other's memory, but {reason}. Choose auto or p2p."
        )
    if dist.get_rank(group) == 0:
        logger.warning("attention's messages go point to point, not through peer memory: %s", reason)
    return P2PTransport(group, device)
