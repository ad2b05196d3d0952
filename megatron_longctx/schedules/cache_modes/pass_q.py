"""Queries travel around a ring (Alg. 3 of "Context Parallelism for Scalable Million-Token Inference")."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import Attend, Block, Kind, Move, Plan, Step
from ..trim import trim
from ..visibility import Visibility


def pass_q(seen: Visibility, keys: Sequence[Sequence[Block]]) -> Plan:
    """Step t: rank r attends for the queries of rank r-t, and passes them on to r+1; at the end all results go home."""
    n = seen.queries.n
    steps = []
    for t in range(n):
        moves = [
            Move(Block(Kind.Q, home, 0, seen.queries.num_tokens(home)), r, (r + 1) % n)
            for r in range(n)
            if seen.queries.num_tokens(home := (r - t) % n) and t < n - 1
        ]
        steps.append(Step(tuple(moves), tuple(calls(seen, (r - t) % n, keys[r]) for r in range(n))))
    return trim(Plan("pass_q", seen.mask, seen.queries, seen.keys, (*steps, *homeward(steps, n))))


def calls(seen: Visibility, q_rank: int, keys: Sequence[Block]) -> tuple[Attend, ...]:
    """All queries of one rank over some keys: one call, or none."""
    found = seen.attend(q_rank, keys)
    return () if found is None else (found,)


def homeward(steps: Sequence[Step], n: int) -> list[Step]:
    """One step in which every rank sends home what it has computed for others.

    Nearest ranks first, as seen from home: the order of merging is then the same whichever rank a sequence begins on.
    """
    rows: dict[tuple[int, int], tuple[int, int]] = {}
    for step in steps:
        for rank, attends in enumerate(step.attends):
            for query in (query for attend in attends for query in attend.queries):
                if query.home != rank:
                    low, high = rows.get((rank, query.home), (query.start, query.stop))
                    rows[rank, query.home] = min(low, query.start), max(high, query.stop)
    moves = [
        Move(Block(Kind.OUT, home, *rows[rank, home], origin=rank), rank, home)
        for rank, home in sorted(rows, key=lambda pair: ((pair[0] - pair[1]) % n, pair))
    ]
    return [Step(tuple(moves), ((),) * n)] if moves else []
