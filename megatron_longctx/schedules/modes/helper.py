"""DistFlashAttn's balanced schedule: ranks with few keys to see compute for ranks with many (paper, section 3.2).

On the contiguous layout rank r has r remote blocks to attend, so that the first ranks would idle. In step t rank r
either works for itself, over the keys of rank r-t, or, having none left, fetches the queries of rank r-t+n, attends its
own keys with them and sends the partial result back. About n/2 steps do the work of a ring's n. What helpers move
(queries and outputs, in backward queries, outputs and gradients) is heads / KV heads times dearer than keys.

Two things are ours. For even n the paper's last step has n/2 pairs for n ranks: half of them idle for a whole block, so
that n ranks reach n / (n + 1) of their speed at most (80% for 4). Here worker and helper share such a pair, half of the
queries each, and no rank idles. And a rank keeps a part of its own block for the end, beside which results travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ..overlap import LEAST_TOKENS
from ..plan import Attend, Kind, Move, Plan, Step
from ..visibility import Visibility
from .mode import Mode


@dataclass(frozen=True)
class Helper(Mode):
    """shares: worker and helper share the last pairs of even n; False for the paper's own schedule (Algorithm 2)."""

    shares: bool = True

    name = "helper"
    about = "DistFlashAttn's helpers"
    layout = "contiguous"

    def plan(self, seen: Visibility) -> Plan:
        """Idle slots: none; without `shares` half of the last step's for even n. Where a rank sees keys of later ranks
        there is nothing to balance: a plain exchange."""
        n = seen.queries.n
        causal = not any(seen.between(r, home) for r in range(n) for home in range(r + 1, n))
        calls = [[_call(seen, r, t, causal, self.shares) for r in range(n)] for t in range(n // 2 + 1 if causal else n)]
        own = [_own(attends) if self.shares else (attends, ()) for attends in calls[0]]
        calls = [[first for first, _ in own], *calls[1:], [last for _, last in own]]
        steps: list[Step] = []
        results: tuple[Move, ...] = ()
        nothing: list[tuple[Attend, ...]] = [()] * n
        for attends, coming in pairwise([*calls, nothing]):
            fetched = tuple(move for r, each in enumerate(coming) for attend in each for move in _fetches(attend, r))
            steps.append(Step(fetched + results, tuple(attends)))
            results = tuple(
                Move(query._replace(kind=Kind.OUT, origin=r), r, query.home)
                for r, each in enumerate(attends)
                for attend in each
                for query in attend.queries
                if query.home != r
            )
        if len(steps) > 1 and not steps[-1].moves and not any(steps[-1].attends):
            steps.pop()
        return Plan(self.name, seen.mask, seen.queries, seen.keys, tuple(steps))


def _call(seen: Visibility, rank: int, t: int, causal: bool, shares: bool) -> tuple[Attend, ...]:
    """What `rank` computes in step `t`: for itself (a worker), for another (a helper), or nothing."""
    n = seen.queries.n
    if t <= rank or not causal:
        found, half = seen.attend_all(rank, (rank - t) % n), 0
    else:
        found, half = seen.attend_all(rank - t + n, rank), 1
    if causal and t and 2 * t == n:  # even n, last step: two ranks for each pair
        return tuple(part for each in found if (part := _half(each, half)) is not None) if shares else found[half:]
    return found


def _half(attend: Attend, half: int) -> Attend | None:
    middle = attend.num_queries // 2
    return attend.part(middle, attend.num_queries) if half else attend.part(0, middle)


def _own(attends: tuple[Attend, ...]) -> tuple[tuple[Attend, ...], tuple[Attend, ...]]:
    """A rank's own block: what comes first, beside the first messages, and what comes last, beside the last."""
    if sum(each.num_queries for each in attends) < LEAST_TOKENS:
        return attends, ()
    parts = [tuple(part for each in attends if (part := _half(each, half)) is not None) for half in (0, 1)]
    return parts[0], parts[1]


def _fetches(attend: Attend, rank: int) -> list[Move]:
    return [Move(block, block.home, rank) for block in (*attend.queries, *attend.keys) if block.home != rank]
