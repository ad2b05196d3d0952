"""DistFlashAttn's balanced schedule: ranks with few keys to see compute for ranks with many (paper, section 3.2).

On the contiguous layout rank r has r remote blocks to attend, so that the first ranks would idle. In step t rank r
either works for itself, over the keys of rank r-t, or, having none left, fetches the queries of rank r-t+n, attends its
own keys with them and sends the partial result back. About n/2 steps do the work of a ring's n. What helpers move
(queries and outputs, in backward queries, outputs and gradients) is heads / KV heads times dearer than keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Attend, Kind, Move, Plan, Step
from ..visibility import Visibility
from .mode import Mode


@dataclass(frozen=True)
class Helper(Mode):
    name = "helper"
    about = "DistFlashAttn's helpers"
    layout = "contiguous"

    def plan(self, seen: Visibility) -> Plan:
        """Idle slots: none for odd n, half of the last step's for even n. Where a rank sees keys of later ranks there
        is nothing to balance: a plain exchange."""
        n = seen.queries.n
        causal = not any(seen.between(r, home) for r in range(n) for home in range(r + 1, n))
        calls = [[_call(seen, r, t, causal) for r in range(n)] for t in range(n // 2 + 1 if causal else n)]
        steps: list[Step] = []
        results: tuple[Move, ...] = ()
        for t, attends in enumerate(calls):
            coming = calls[t + 1] if t + 1 < len(calls) else [()] * n
            fetched = tuple(move for r, each in enumerate(coming) for attend in each for move in _fetches(attend, r))
            steps.append(Step(fetched + results, tuple(attends)))
            results = tuple(
                Move(query._replace(kind=Kind.OUT, origin=r), r, query.home)
                for r, each in enumerate(attends)
                for attend in each
                for query in attend.queries
                if query.home != r
            )
        if results:
            steps.append(Step(results, ((),) * n))
        return Plan(self.name, seen.mask, seen.queries, seen.keys, tuple(steps))


def _call(seen: Visibility, rank: int, t: int, causal: bool) -> tuple[Attend, ...]:
    """What `rank` computes in step `t`: for itself (a worker), for another (a helper), or nothing."""
    n = seen.queries.n
    if t <= rank or not causal:
        return seen.attend_all(rank, (rank - t) % n)
    if 2 * t == n:  # even n, last step: the rank that would be helped computes this pair itself
        return ()
    return seen.attend_all(rank - t + n, rank)


def _fetches(attend: Attend, rank: int) -> list[Move]:
    return [Move(block, block.home, rank) for block in (*attend.queries, *attend.keys) if block.home != rank]
