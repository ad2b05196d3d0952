"""DeepSpeed-Ulysses: ranks exchange tokens for heads, attend whole sequences, and exchange back.

One all-to-all gives every rank an n-th of the heads for all tokens, so that attention is a single kernel call with the
mask of one rank; a second one returns the outputs. KV heads that the ranks outnumber are held by several ranks. In
chunks of the heads, all but the first and the last of these exchanges run beside attention.
"""

from __future__ import annotations

from ..layout import Layout
from .plan import Attend, Block, Heads, Kind, Move, Plan, Step


def ulysses(layout: Layout, causal: bool, chunks: int = 1) -> Plan:
    """Queries and keys of a rank's heads arrive, are attended, and their outputs return, one chunk of heads after the
    other: while a chunk is attended, the next arrives and the outputs of the one before return.

    Args:
        layout: contiguous, so that the ranks' tokens one after the other are the sequence. The number of ranks must
            divide the query heads, and divide the KV heads or be a multiple of them.
        chunks: equal parts of a rank's heads. Times the ranks, it must divide the KV heads where it is more than 1.
    """
    n = layout.n
    homes = [rank for rank in range(n) if layout.num_tokens(rank)]
    if n == 1 or not homes:
        calls = tuple(
            Attend((_of(Kind.Q, layout, home, Heads()),), (_of(Kind.KV, layout, home, Heads()),), causal)
            for home in homes
        )
        return Plan("ulysses", layout, causal, (Step((), (calls, *((),) * (n - 1))),))
    moves: list[list[Move]] = [[] for _ in range(chunks + 2)]
    attends: list[list[tuple[Attend, ...]]] = [[()] * n for _ in range(chunks + 2)]
    for rank in range(n):
        for chunk in range(chunks):
            part = Heads(chunk * n + rank, chunks * n)  # a chunk of all ranks lies side by side, to be packed at once
            queries = tuple(_of(Kind.Q, layout, home, part) for home in homes)
            keys = tuple(_of(Kind.KV, layout, home, part) for home in homes)
            moves[chunk] += [Move(block, block.home, rank) for block in (*queries, *keys) if block.home != rank]
            attends[chunk + 1][rank] = (Attend(queries, keys, causal),)
            moves[chunk + 2] += [
                Move(query._replace(kind=Kind.OUT, origin=rank), rank, query.home)
                for query in queries
                if query.home != rank
            ]
    steps = tuple(Step(tuple(sent), tuple(calls)) for sent, calls in zip(moves, attends, strict=True))
    return Plan("ulysses", layout, causal, steps)


def _of(kind: Kind, layout: Layout, home: int, heads: Heads) -> Block:
    return Block(kind, home, 0, layout.num_tokens(home), heads=heads)
