"""The executor: runs any plan, forward and backward, on any kernel and transport.

`ContextParallelAttention` is attention over a sequence sharded among ranks; `AttentionResult` what a call gave. `bind`
gives a program its tensors, `run` follows it, `function` is the autograd function; `kv_format` has ways of keys and
values to be stored and moved.
"""

from .context_parallel import ContextParallelAttention
from .function import AttentionResult
