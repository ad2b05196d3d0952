"""DistFlashAttn's balanced schedule: ranks with few keys to see compute for ranks with many (paper, section 3.2).

On the contiguous layout rank r has r remote blocks to attend, so that the first ranks would idle. In step t rank r
either works for itself, over the keys of rank r-t, or, having none left, fetches the queries of rank r-t+n, attends its
own keys with them and sends the partial result back. About n/2 steps do the work of a ring's n. What helpers move
(queries and outputs, in backward queries, outputs and gradients) is heads / KV heads times dearer than keys.
"""

from __future__ import annotations

from ..layout import Layout
from .calls import attends_on
from .plan import Attend, Block, Kind, Move, Plan, Step


def helper(layout: Layout, causal: bool) -> Plan:
    """Idle slots: none for odd n, half of the last step's for even n. Under a full mask nobody idles: a plain exchange.

    Args:
        layout: contiguous; every rank sees the whole of every lower rank.
    """
    n = layout.n
    computed = [[_call(layout, r, t, causal) for r in range(n)] for t in range(n // 2 + 1 if causal else n)]
    steps: list[Step] = []
    results: tuple[Move, ...] = ()
    for t, calls in enumerate(computed):
        coming = computed[t + 1] if t + 1 < len(computed) else [()] * n
        fetched = tuple(move for r, attends in enumerate(coming) for attend in attends for move in _fetches(attend, r))
        steps.append(Step(fetched + results, tuple(calls)))
        results = tuple(
            Move(query._replace(kind=Kind.OUT, origin=r), r, query.home)
            for r, attends in enumerate(calls)
            for attend in attends
            for query in attend.queries
            if query.home != r
        )
    if results:
        steps.append(Step(results, ((),) * n))
    return Plan("helper", layout, causal, tuple(steps))


def _call(layout: Layout, rank: int, t: int, causal: bool) -> tuple[Attend, ...]:
    """What `rank` computes in step `t`: for itself (a worker), for another (a helper), or nothing."""
    n = layout.n
    if t <= rank or not causal:
        return attends_on(layout, rank, (rank - t) % n, causal)
    if 2 * t == n:  # even n, last step: the rank that would be helped computes this pair itself
        return ()
    return attends_on(layout, rank - t + n, rank, causal)


def _fetches(attend: Attend, rank: int) -> list[Move]:
    blocks: tuple[Block, ...] = (*attend.queries, *attend.keys)
    return [Move(block, block.home, rank) for block in blocks if block.home != rank]
