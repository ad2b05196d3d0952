"""The only room that issues communication. It moves tensors between ranks and knows nothing of attention.

`P2PTransport` sends and receives batches of messages on a stream of its own; `PeerTransport` lets receivers pull out of
the senders' memory; `HybridTransport` does the one between hosts and the other within; `choose_transport` takes one of
them. `BufferPool` lends the memory in which messages land; `StreamClock` measures how long a rank waits for them.
`PeerMerge` merges what ranks have found for the same queries.
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
