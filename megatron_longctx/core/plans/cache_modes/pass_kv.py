"""Keys travel around a ring (Alg. 2 of "Context Parallelism for Scalable Million-Token Inference")."""

from collections.abc import Sequence

from ..modes.ring import ring
from ..plan import Block, Plan
from ..visibility import Visibility


def pass_kv(visible: Visibility, keys: Sequence[Sequence[Block]]) -> Plan:
    """In step t, rank r attends to the keys of rank r-t and passes on to r+1 those that a later rank still needs."""
    return ring(visible, "pass_kv", keys)
