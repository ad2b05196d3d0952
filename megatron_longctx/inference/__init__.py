"""Prefill, multi-turn sessions and decode over a KV cache that is sharded over ranks, without Megatron.

`CacheManager` tracks which slot stores which token, and `Batch` plans the attention of new tokens over it.
`CachedAttention` runs these plans with the executor and the kernels of training. `LongContextEngine` is the interface
for users; `mcore.inference` builds it from a run.
"""

from .batch import Batch, ScheduledChunk
from .cache_manager import CacheFull, CacheManager
from .cached_attention import CachedAttention, CachedModel, CacheShape
from .choose_cache_mode import Chooser
from .engine import LongContextEngine
from .sampling import Sampling
from .session import Session
