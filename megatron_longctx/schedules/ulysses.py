"""DeepSpeed-Ulysses: ranks exchange tokens for heads, attend whole sequences, and exchange back.

One all-to-all gives every rank an n-th of the heads for all tokens, so that attention is a single kernel call with the
mask of one rank; a second one returns the outputs. KV heads that the ranks outnumber are held by several ranks.
"""

from __future__ import annotations

from ..layout import Layout
from .plan import Attend, Block, Heads, Kind, Move, Plan, Step


def ulysses(layout: Layout, causal: bool) -> Plan:
    """Step 0 exchanges queries and keys, step 1 attends, step 2 returns the outputs.

    Args:
        layout: contiguous, so that the ranks' tokens one after the other are the sequence. The number of ranks must
            divide the query heads, and divide the KV heads or be a multiple of them.
    """
    n = layout.n
    homes = [rank for rank in range(n) if layout.num_tokens(rank)]
    if n == 1 or not homes:
        calls = tuple(
            Attend((_of(Kind.Q, layout, home, Heads()),), (_of(Kind.KV, layout, home, Heads()),), causal)
            for home in homes
        )
        return Plan("ulysses", layout, causal, (Step((), (calls, *((),) * (n - 1))),))
    exchange, returns, attends = [], [], []
    for rank in range(n):
        part = Heads(rank, n)
        queries = tuple(_of(Kind.Q, layout, home, part) for home in homes)
        keys = tuple(_of(Kind.KV, layout, home, part) for home in homes)
        attends.append((Attend(queries, keys, causal),))
        exchange += [Move(block, block.home, rank) for block in (*queries, *keys) if block.home != rank]
        returns += [
            Move(query._replace(kind=Kind.OUT, origin=rank), rank, query.home)
            for query in queries
            if query.home != rank
        ]
    idle: tuple[tuple[Attend, ...], ...] = ((),) * n
    steps = (Step(tuple(exchange), idle), Step((), tuple(attends)), Step(tuple(returns), idle))
    return Plan("ulysses", layout, causal, steps)


def _of(kind: Kind, layout: Layout, home: int, heads: Heads) -> Block:
    return Block(kind, home, 0, layout.num_tokens(home), heads=heads)
