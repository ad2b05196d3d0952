"""The executor: runs any plan, forward and backward, on any kernel and transport.

`ContextParallelAttention` is attention over a sequence sharded among ranks; `AttentionResult` what a call gave.
"""

from .context_parallel import ContextParallelAttention
from .function import AttentionResult
