"""Queries go straight to every rank, partial results back: two exchanges whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import Block, Kind, Move, Plan, Step
from ..trim import trim
from ..visibility import Visibility
from .pass_q import calls, homeward


def one_hop(seen: Visibility, keys: Sequence[Sequence[Block]]) -> Plan:
    """Queries go to all ranks while each attends its own; then each attends for the others; then results go home."""
    n = seen.queries.n
    own = tuple(calls(seen, r, keys[r]) for r in range(n))
    others = tuple(tuple(c for t in range(1, n) for c in calls(seen, (r - t) % n, keys[r])) for r in range(n))
    moves = [
        Move(Block(Kind.Q, home, 0, seen.queries.num_tokens(home)), home, (home + t) % n)
        for t in range(1, n)
        for home in range(n)
        if seen.queries.num_tokens(home)
    ]
    steps = [Step(tuple(moves), own)] + ([Step((), others)] if n > 1 else [])
    return trim(Plan("one_hop", seen.mask, seen.queries, seen.keys, (*steps, *homeward(steps, n))))
