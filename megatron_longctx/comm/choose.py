"""Which transport a group of ranks gets."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from ..config import check_value
from .channel import Transport
from .collect import PeerMemoryError
from .hosts import find_hosts
from .hybrid import HybridTransport
from .p2p import P2PTransport
from .peer import PeerTransport

logger = logging.getLogger(__name__)


def choose_transport(
    name: str, group: dist.ProcessGroup, device: torch.device, growth: float = 1.0, key: str = "attention.transport"
) -> Transport:
    """All ranks of `group` call this together and get the same kind.

    Args:
        name: `peer` for peer memory, `p2p` for point-to-point messages, `auto` for peer memory where the GPUs can read
            each other's and point-to-point messages elsewhere: all the one, all the other, or hybrid, message by
            message. Said once with the reason.
        growth: of peer memory, see `PeerTransport`.
        key: the setting that `name` comes from, for messages.

    Raises:
        ValueError: an unknown name, or peer memory asked for where there is none.
    """
    check_value(key, name)
    if name == "p2p" or (name == "auto" and device.type != "cuda"):
        return P2PTransport(group, device)
    hosts = find_hosts(group, device)
    reason = hosts.reason
    try:
        if reason is None:
            return PeerTransport(group, device, growth=growth, key=key)
        if name == "auto" and hosts.any_peers:
            transport = HybridTransport(PeerTransport(group, device, hosts, growth, key))
            if dist.get_rank(group) == 0:
                logger.info(
                    "attention's messages go through peer memory within hosts (ranks %s) and point to point between "
                    "them: %s", hosts, reason,
                )  # fmt: skip
            return transport
    except PeerMemoryError as error:  # on all ranks alike
        reason = str(error).rstrip(".")
    if name == "peer":
        raise ValueError(
            f"{key}=peer: expected GPUs that can read each other's memory, but {reason}. Choose auto or p2p."
        )
    if dist.get_rank(group) == 0:
        logger.warning("attention's messages go point to point, not through peer memory: %s", reason)
    return P2PTransport(group, device)


def transport_name(transport: Transport) -> str:
    """`peer`, `p2p` or `hybrid`."""
    return {P2PTransport: "p2p", PeerTransport: "peer", HybridTransport: "hybrid"}[type(transport)]
