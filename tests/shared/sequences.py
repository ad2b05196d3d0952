"""A rank's view of a sharded sequence, without other processes: for everything that does not communicate."""

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.mcore.sequence import ShardedSequence


def sequence_of(
    rank: int = 0, world: int = 1, length: int = 16, schedule: str = "zigzag", unit: int = 1, kernel: str = "reference"
) -> ShardedSequence:
    """What `rank` of `world` context-parallel ranks would have; calls of its attention work for one rank only."""
    attention = ContextParallelAttention(schedule=schedule, unit=unit, kernel=kernel)
    attention.rank, attention.world = rank, world
    return ShardedSequence(attention, length)
