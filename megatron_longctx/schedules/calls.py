"""From visible regions to kernel calls: what a rank computes once it holds some keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..layout import Layout
from .plan import Attend, Block, Kind
from .visibility import Region, visible_regions


def attends_on(layout: Layout, q_rank: int, k_rank: int, causal: bool) -> tuple[Attend, ...]:
    """The kernel calls for all of `q_rank`'s queries against all of `k_rank`'s keys."""
    keys = layout.num_tokens(k_rank)
    return attends_over(layout, q_rank, [Block(Kind.KV, k_rank, 0, keys)] if keys else [], causal)


def attends_over(layout: Layout, q_rank: int, pieces: Iterable[Block], causal: bool) -> tuple[Attend, ...]:
    """The fewest kernel calls for all of `q_rank`'s queries against some keys: those seen by the same queries are one.

    Args:
        pieces: key blocks of any ranks, in the order in which they lie in memory.
    """
    diagonals: list[Attend] = []
    shared: dict[tuple[int, int], list[Block]] = {}
    for piece in pieces:
        for region in visible_regions(layout, q_rank, piece.home, causal):
            for q0, q1, k0, k1, diagonal in _cut(region, piece.start, piece.stop):
                key = piece._replace(start=k0, stop=k1)
                if diagonal:
                    diagonals.append(Attend((Block(Kind.Q, q_rank, q0, q1),), (key,), True))
                else:
                    shared.setdefault((q0, q1), []).append(key)
    full = [Attend((Block(Kind.Q, q_rank, q0, q1),), tuple(keys), False) for (q0, q1), keys in shared.items()]
    return (*diagonals, *full)


def _cut(region: Region, start: int, stop: int) -> Iterator[Region]:
    """The part of `region` with keys `start..stop-1`: of a diagonal, a smaller one and the queries below it."""
    k0, k1 = max(region.k_start, start), min(region.k_stop, stop)
    if k0 >= k1:
        return
    if not region.causal:
        yield region._replace(k_start=k0, k_stop=k1)
        return
    q0 = region.q_start + k0 - region.k_start
    q1 = q0 + k1 - k0
    yield Region(q0, q1, k0, k1, True)
    if q1 < region.q_stop:
        yield Region(q1, region.q_stop, k0, k1, False)
