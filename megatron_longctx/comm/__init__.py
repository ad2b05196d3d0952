"""The only room that communicates. It moves tensors between ranks and is independent of attention.

`P2PTransport` sends and receives batches of messages on its own stream. With `PeerTransport`, receivers pull from the
senders' memory. `HybridTransport` uses peer memory within hosts and messages between them. `choose_transport` selects a
transport. `BufferPool` lends memory for received messages, and `StreamClock` measures how long a rank waits for them.
`PeerMerge` merges the partial results of several ranks for the same queries.
"""

from .buffers import BufferPool
from .channel import Channel, Transport
from .choose import choose_transport, transport_name
from .collect import PeerMemoryError, from_all, from_first, from_rank_0, gather_over, on_rank_0, sum_over
from .hybrid import HybridTransport
from .p2p import Exchange, P2PTransport
from .peer import PeerTransport, SymmetricExchange
from .peer_merge import PeerMerge
from .waiting import StreamClock, Times, measured
