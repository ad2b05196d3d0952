"""The executor: runs any plan, forward and backward, on any kernel and transport.

`ContextParallelAttention` is the room's one public thing: attention over a sequence sharded among ranks.
"""

from .context_parallel import ContextParallelAttention

__all__ = ["ContextParallelAttention"]
