"""All communication between ranks; it moves tensors and knows nothing of attention.

`P2PTransport` sends and receives batches of messages on its own stream. With `PeerTransport`, receivers pull from the
senders' memory. `choose_transport` selects one of them. `BufferPool` provides memory for received messages, and
`StreamClock` measures how long a rank waits for them.
"""

from .collectives import PeerMemoryError, all_gather_rows, all_reduce_sum, all_to_all_rows, gather_objects, on_rank_0
from .device import AttentionTimes, BufferPool, StreamClock, timed
from .p2p import Channel, Exchange, P2PTransport, Transport
from .peer import PeerTransport, SymmetricExchange, choose_transport
