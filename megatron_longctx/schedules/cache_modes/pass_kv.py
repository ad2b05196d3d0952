"""Keys travel around a ring (Alg. 2 of "Context Parallelism for Scalable Million-Token Inference")."""

from __future__ import annotations

from collections.abc import Sequence

from ..modes.ring import ring
from ..plan import Block, Plan
from ..visibility import Visibility


def pass_kv(seen: Visibility, keys: Sequence[Sequence[Block]]) -> Plan:
    """Step t: rank r attends to what rank r-t has, and passes on to r+1 what somebody there still needs of it."""
    return ring(seen, "pass_kv", keys)
