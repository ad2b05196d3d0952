"""The few shapes of blocks for which a kernel prepares itself, where that takes long and lengths never repeat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

_LEAST_ROWS = 2**14
"""Queries x heads from which on a block occupies a GPU: kernels give 128 queries of a head to a processor, and an H200
has 132 of these."""

_LEAST_OPERATIONS = 5e10
"""Of a block that is worth a call of its own. Estimated, not measured: the smallest power of two above it, 6.9e10 with
32 heads of 128, takes 0.09 ms longer in FlashAttention-2 (330 TFLOP/s) than in cuDNN (600), about what the host needs
to issue a call."""


@dataclass(frozen=True)
class PlannedShapes:
    """Powers of two: from `least_queries` and `least_keys` to `most` of either, and `least_pairs` together."""

    least_queries: int
    least_keys: int
    least_pairs: int
    most: int = 32768

    def has(self, queries: int, keys: int, causal: bool) -> bool:
        """Whether a block of this shape is one of them."""
        return (
            self.least_queries <= queries <= self.most
            and self.least_keys <= keys <= self.most
            and not queries & (queries - 1)
            and not keys & (keys - 1)
            and queries * keys >= self.least_pairs * (1 + causal)
        )

    def all(self) -> Iterator[tuple[int, int, bool]]:
        """(queries, keys, causal) of each."""
        powers = [2**i for i in range(self.most.bit_length())]
        for queries in powers:
            yield from ((queries, keys, False) for keys in powers if self.has(queries, keys, False))
            if self.has(queries, queries, True):
                yield queries, queries, True


@cache
def planned_shapes(num_heads: int, head_dim: int) -> PlannedShapes:
    """Those of so many query heads: 36 with 32 heads of 128."""
    return PlannedShapes(
        least_queries=max(128, _power_of_two(_LEAST_ROWS / num_heads)),
        least_keys=2048,
        least_pairs=_power_of_two(_LEAST_OPERATIONS / (4 * num_heads * head_dim)),
    )


def _power_of_two(least: float) -> int:
    """The smallest that is not below `least`."""
    power = 1
    while power < least:
        power *= 2
    return power
