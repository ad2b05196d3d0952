"""Prefill, multi-turn sessions and decode over a cache that is sharded over ranks, without Megatron.

`CacheManager` tracks where every token lies, and `Batch` makes plans of new tokens over it. `CachedAttention` runs the
plans on the executor and the kernels of training. `LongContextEngine` is the interface for users; `mcore.inference`
builds it from a run.
"""

from .batch import Batch
from .cache_manager import CacheFull, CacheManager, ScheduledChunk
from .cached_attention import CachedAttention, CachedModel, CacheShape
from .choice import Chooser, Decision, Figures
from .engine import EngineSettings, LongContextEngine, Session
from .sampling import Sampling
