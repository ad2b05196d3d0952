"""The only room that issues communication. It moves tensors between ranks and knows nothing of attention.

`P2PTransport` sends and receives batches of messages on a stream of its own; `BufferPool` lends the memory in which
they land.
"""

from .buffers import BufferPool
from .collect import sum_over
from .p2p import Exchange, P2PTransport

__all__ = ["BufferPool", "Exchange", "P2PTransport", "sum_over"]
