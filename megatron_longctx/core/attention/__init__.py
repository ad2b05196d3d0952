"""The executor: runs any plan, forward and backward, on any kernel and transport.

`ContextParallelAttention` is attention over a sequence sharded over ranks, and `AttentionResult` is the result of a
call. `execute` replays recordings over `registers`, which have the tensors, and `function` is the autograd function.
`kv_format` has the shapes of rows, and the formats in which keys and values are stored and sent.
"""

from .context_parallel import ContextParallelAttention
from .function import AttentionResult
