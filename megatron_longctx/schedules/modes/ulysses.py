"""DeepSpeed-Ulysses: ranks exchange tokens for heads, attend whole sequences, and exchange back.

One all-to-all gives every rank an n-th of the heads for all tokens, so that attention is what one rank alone would
compute; a second one returns the outputs. KV heads that the ranks outnumber are held by several ranks. In chunks of the
heads, all but the first and the last of these exchanges run beside attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import refuse
from ...layout import Layout
from ..plan import ALL_HEADS, Attend, Block, Heads, Kind, Move, Plan, Step
from ..visibility import Visibility
from .mode import Choices, Mode, ModeOptions, check_shared_heads


@dataclass(frozen=True)
class Ulysses(Mode):
    """head_chunks: equal parts of a rank's heads. Times the ranks, they must divide the KV heads where they are more
    than 1."""

    head_chunks: int = 1

    name = "ulysses"
    about = "tokens exchanged for heads"
    layout = "contiguous"
    takes_any_layout = False
    splits_heads = True

    @classmethod
    def of(cls, options: ModeOptions, n: int) -> Mode:
        return cls(options.head_chunks)

    @classmethod
    def candidates(cls, choices: Choices) -> Iterator[Mode]:
        """Two chunks between nodes; on one node they gain about what they cost, unless a measurement says more."""
        yield cls()
        two = cls(2)
        fits = choices.n > 1 and choices.num_kv_heads % (2 * choices.n) == 0
        if fits and (choices.cluster.nodes > 1 or str(two) in choices.measured):
            yield two

    def num_messages(self, n: int, length: int) -> int:
        return 3 * n * n * self.head_chunks

    def plan(self, seen: Visibility) -> Plan:
        """Queries and keys of a rank's heads arrive, are attended, and their outputs return, one chunk of heads after
        the other: while a chunk is attended, the next arrives and the outputs of the one before return."""
        layout, n, chunks = seen.queries, seen.queries.n, self.head_chunks
        homes = [rank for rank in range(n) if layout.num_tokens(rank)]
        if n == 1 or not seen.mask.slices:
            own = tuple(seen.attend_all(rank, rank) for rank in range(n))
            return Plan(self.name, seen.mask, layout, seen.keys, (Step((), own),))
        moves: list[list[Move]] = [[] for _ in range(chunks + 2)]
        attends: list[list[tuple[Attend, ...]]] = [[()] * n for _ in range(chunks + 2)]
        for rank in range(n):
            for chunk in range(chunks):
                part = Heads(
                    chunk * n + rank, chunks * n
                )  # a chunk of all ranks lies side by side, to be packed at once
                queries = tuple(_of(Kind.Q, layout, home, part) for home in homes)
                keys = tuple(_of(Kind.KV, layout, home, part) for home in homes)
                moves[chunk] += [Move(block, block.home, rank) for block in (*queries, *keys) if block.home != rank]
                # The ranks' tokens one after the other are the sequence.
                attends[chunk + 1][rank] = (Attend(queries, keys, seen.mask.slices),)
                moves[chunk + 2] += [
                    Move(query._replace(kind=Kind.OUT, origin=rank), rank, query.home)
                    for query in queries
                    if query.home != rank
                ]
        steps = tuple(Step(tuple(sent), tuple(calls)) for sent, calls in zip(moves, attends, strict=True))
        return Plan(self.name, seen.mask, layout, seen.keys, steps)

    def check_heads(self, n: int, num_heads: int, num_kv_heads: int) -> None:
        chunks = self.head_chunks
        if chunks > 1 and n > 1 and num_kv_heads % (n * chunks):
            legal = ", ".join(str(k) for k in range(1, num_kv_heads + 1) if num_kv_heads % (n * k) == 0) or "1"
            expected = f"a number that times {n} ranks divides the {num_kv_heads} key/value heads"
            raise refuse("parallelism.head_chunks", chunks, expected, f"Choose one of {legal}.")
        check_shared_heads(n, num_heads, num_kv_heads, "schedule ulysses", range(1, num_heads + 1))


def _of(kind: Kind, layout: Layout, home: int, heads: Heads = ALL_HEADS) -> Block:
    return Block(kind, home, 0, layout.num_tokens(home), heads=heads)
