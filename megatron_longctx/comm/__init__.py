"""The only room that issues communication. It moves tensors between ranks and knows nothing of attention.

`P2PTransport` sends and receives batches of messages on a stream of its own; `PeerTransport` lets receivers pull out of
the senders' memory; `choose_transport` takes one of them. `BufferPool` lends the memory in which messages land.
"""

from .buffers import BufferPool
from .choose import choose_transport, transport_name
from .p2p import Exchange, P2PTransport
from .peer import Mailbox, Outbox, OutboxBuilder, PeerTransport, Sent

__all__ = [
    "BufferPool",
    "Exchange",
    "Mailbox",
    "Outbox",
    "OutboxBuilder",
    "P2PTransport",
    "PeerTransport",
    "Sent",
    "choose_transport",
    "transport_name",
]
