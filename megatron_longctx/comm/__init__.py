"""All communication between ranks; it moves tensors and knows nothing of attention.

`P2PTransport` sends and receives batches of messages on its own stream. With `PeerTransport`, receivers pull from the
senders' memory. `HybridTransport` uses peer memory within hosts and messages between them. `choose_transport` selects a
transport. `BufferPool` provides memory for received messages, and `StreamClock` measures how long a rank waits for
them. `PeerMerge` merges the partial results of several ranks for the same queries.
"""

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
from .hybrid import HybridTransport, choose_transport
from .p2p import Channel, Exchange, P2PTransport, Transport
from .peer import PeerTransport, SymmetricExchange
from .peer_merge import PeerMerge
