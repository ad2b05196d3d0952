"""Prefill, multi-turn cache and decode over a cache that is sharded among ranks, without Megatron.

`CacheManager` knows where every token lies; `Batch` makes plans of new tokens over that; `CachedAttention` runs them on
the executor and kernels of training; `LongContextEngine` is what users talk to, `mcore.inference` builds it from a run.
"""

from .batch import Batch
from .cache_manager import CacheFull, CacheManager, ScheduledChunk
from .cached_attention import CachedAttention, CachedModel, CacheShape
from .choice import Chooser, Decision, Figures
from .decode import DecodeSettings
from .engine import EngineSettings, LongContextEngine, Session
from .sampling import Sampling
