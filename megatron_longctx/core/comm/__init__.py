"""All communication between ranks; it moves tensors and knows nothing of attention.

`P2PTransport` sends and receives batches of messages on its own stream. With `PeerTransport`, receivers pull from the
senders' memory. `choose_transport` selects one of them. `BufferPool` provides memory for received messages, and
`StreamClock` measures how long a rank waits for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .collectives import (
    PeerMemoryError,
    all_gather_rows,
    all_reduce_sum,
    broadcast_from_first,
    broadcast_json,
    gather_objects,
    on_rank_0,
)
from .device import AttentionTimes, BufferPool, StreamClock, timed
from .p2p import Channel, Exchange, P2PTransport, Transport

if TYPE_CHECKING:
    from .peer import PeerTransport, SymmetricExchange
    from .transports import choose_transport

_ON_FIRST_USE = {"choose_transport": "transports", "PeerTransport": "peer", "SymmetricExchange": "peer"}


def __getattr__(name: str) -> Any:
    """Load what uses peer memory on first use: one rank, and ranks of CPUs, do without."""
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
