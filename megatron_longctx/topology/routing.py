"""Where blocks are as they go round: pure integers, made once before a run (TASP section 4.1).

A ring lists all ranks; in every step each rank passes the block it holds to the next rank of the ring, the last to the
first. At step 0 every rank holds its own block, so at step t rank r holds the block of the rank t places before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Ring = tuple[int, ...]
Rings = tuple[Ring, ...]


@lru_cache(maxsize=4096)
def _places(ring: Ring) -> tuple[int, ...]:
    """Place of every rank in the ring, by rank."""
    if sorted(ring) != list(range(len(ring))):
        raise ValueError(f"ring {ring}: expected every rank 0..{len(ring) - 1} once. Use rings of rings_for.")
    places = [0] * len(ring)
    for place, rank in enumerate(ring):
        places[rank] = place
    return tuple(places)


def successors(ring: Ring) -> tuple[int, ...]:
    """For every rank, the rank it sends to."""
    return tuple(ring[(place + 1) % len(ring)] for place in _places(ring))


def predecessors(ring: Ring) -> tuple[int, ...]:
    """For every rank, the rank it receives from."""
    return tuple(ring[place - 1] for place in _places(ring))


def held(ring: Ring, rank: int, step: int) -> int:
    """Home of the block that `rank` holds at `step`."""
    return ring[(_places(ring)[rank] - step) % len(ring)]


def holder(ring: Ring, home: int, step: int) -> int:
    """The rank that holds the block of `home` at `step`: the inverse of `held`."""
    return ring[(_places(ring)[home] + step) % len(ring)]


@dataclass(frozen=True)
class Routing:
    """The tables of several rings over the same ranks, each a tuple indexed by ring, then rank."""

    rings: Rings

    def __post_init__(self) -> None:
        if len({len(ring) for ring in self.rings}) != 1:
            raise ValueError(f"rings {self.rings}: expected one or more rings over the same ranks. Use rings_for.")

    @property
    def n(self) -> int:
        return len(self.rings[0])

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(successors, self.rings))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(predecessors, self.rings))

    @cached_property
    def ring_of(self) -> tuple[tuple[int, ...], ...]:
        """`ring_of[a][b]`: the ring in which a sends to b, -1 if none (the mapping of TASP algorithm 2): which block of
        rank a is its part for b in one all-to-all.

        Raises:
            ValueError: two rings use the same arc.
        """
        table = [[-1] * self.n for _ in range(self.n)]
        for i, after in enumerate(self.successors):
            for a, b in enumerate(after):
                if table[a][b] >= 0:
                    raise ValueError(f"rings {table[a][b]} and {i}: expected no common arc, both have {a} -> {b}.")
                table[a][b] = i
        return tuple(map(tuple, table))

    def held(self, ring: int, rank: int, step: int) -> int:
        return held(self.rings[ring], rank, step)

    def arcs(self, ranks: Sequence[int] | None = None) -> tuple[tuple[int, int, int], ...]:
        """(ring, source, destination) of every message of a step, for all sources or some."""
        sources = range(self.n) if ranks is None else ranks
        return tuple((i, a, after[a]) for i, after in enumerate(self.successors) for a in sources if after[a] != a)
