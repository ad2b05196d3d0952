"""Which transport a group of ranks gets."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from ..config import TRANSPORTS
from .p2p import P2PTransport
from .peer import PeerTransport, why_no_peers

logger = logging.getLogger(__name__)


def choose_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> P2PTransport | PeerTransport:
    """All ranks of `group` call this together and get the same kind.

    Args:
        name: `peer` for peer memory, `p2p` for point-to-point messages, `auto` for peer memory where the GPUs can read
            each other's and point-to-point messages elsewhere, said once with the reason.

    Raises:
        ValueError: an unknown name, or peer memory asked for where there is none.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"attention.transport={name}: expected one of {', '.join(TRANSPORTS)}. Choose one of these.")
    if name == "p2p" or (name == "auto" and device.type != "cuda"):
        return P2PTransport(group, device)
    reason = why_no_peers(group, device)
    transport: PeerTransport | None = None
    if reason is None:
        transport, reason = _set_up(group, device)
    if transport is not None:
        return transport
    if name == "peer":
        raise ValueError(
            f"attention.transport=peer: expected GPUs that can read each other's memory, but {reason}. "
            "Choose auto or p2p."
        )
    if dist.get_rank(group) == 0:
        logger.warning("attention's messages go point to point, not through peer memory: %s", reason)
    return P2PTransport(group, device)


def transport_name(transport: P2PTransport | PeerTransport) -> str:
    """`peer` or `p2p`."""
    return "peer" if isinstance(transport, PeerTransport) else "p2p"


def _set_up(group: dist.ProcessGroup, device: torch.device) -> tuple[PeerTransport | None, str | None]:
    """The transport if all ranks could set it up, else the reason of one that could not."""
    transport, failed = None, None
    try:
        transport = PeerTransport(group, device)
    except (RuntimeError, ImportError, OSError) as error:
        failed = str(error).split("\n", 1)[0]
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, failed, group=group)
    reasons = [reason for reason in said if reason is not None]
    return (None, f"setting it up failed: {reasons[0]}") if reasons else (transport, None)
