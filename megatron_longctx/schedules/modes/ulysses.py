"""DeepSpeed-Ulysses: ranks exchange tokens for heads, attend to whole sequences, and exchange back.

One all-to-all gives every rank an n-th of the heads for all tokens, so that it computes attention as one rank alone
would; a second one returns the outputs. If there are fewer KV heads than ranks, several ranks hold the same one. If the
heads are exchanged in chunks, all but the first and the last of these exchanges run beside attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import refuse
from ..plan import Attend, Block, Heads, Kind, Move, Plan, Step
from ..visibility import Visibility
from .mode import Mode, ModeOptions, SearchContext, check_shared_heads


@dataclass(frozen=True)
class Ulysses(Mode):
    """head_chunks: equal parts of a rank's heads; above 1, the ranks times the chunks must divide the KV heads."""

    head_chunks: int = 1

    name = "ulysses"
    layout = "contiguous"
    takes_any_layout = False
    splits_heads = True

    @classmethod
    def from_options(cls, options: ModeOptions, n: int) -> Mode:
        return cls(options.head_chunks)

    @classmethod
    def candidates(cls, context: SearchContext) -> Iterator[Mode]:
        """Yield two chunks only for several nodes; on one node they gain what they cost, unless measured otherwise."""
        yield cls()
        two = cls(2)
        fits = context.n > 1 and context.num_kv_heads % (2 * context.n) == 0
        if fits and (context.cluster.nodes > 1 or str(two) in context.measured_modes):
            yield two

    def num_messages(self, n: int, length: int) -> int:
        return 3 * n * n * self.head_chunks

    def plan(self, visible: Visibility) -> Plan:
        """Attend to a chunk of heads while the next chunk arrives and the outputs of the previous one return."""
        layout, n, chunks = visible.queries, visible.queries.n, self.head_chunks
        if n == 1 or not visible.mask.slices:
            own = tuple(visible.attend(rank, visible.all_keys[rank]) for rank in range(n))
            return Plan(self.name, visible.mask, layout, visible.keys, (Step((), own),))
        spans = [(rank, 0, layout.num_tokens(rank)) for rank in range(n) if layout.num_tokens(rank)]
        moves: list[list[Move]] = [[] for _ in range(chunks + 2)]
        attends: list[list[tuple[Attend, ...]]] = [[()] * n for _ in range(chunks + 2)]
        for rank in range(n):
            for chunk in range(chunks):
                part = Heads(chunk * n + rank, chunks * n)  # the heads of a chunk are adjacent, to be packed together
                queries = tuple(Block(Kind.Q, *span, heads=part) for span in spans)
                keys = tuple(Block(Kind.KV, *span, heads=part) for span in spans)
                moves[chunk] += [Move(block, block.home, rank) for block in (*queries, *keys) if block.home != rank]
                # The concatenated tokens of all ranks are the sequence, so the slices are those of the mask.
                attends[chunk + 1][rank] = (Attend(queries, keys, visible.mask.slices),)
                moves[chunk + 2] += [
                    Move(query.result(Kind.OUT, rank), rank, query.home) for query in queries if query.home != rank
                ]
        steps = tuple(Step(tuple(sent), tuple(calls)) for sent, calls in zip(moves, attends, strict=True))
        return Plan(self.name, visible.mask, layout, visible.keys, steps)

    def check_heads(self, n: int, num_heads: int, num_kv_heads: int) -> None:
        chunks = self.head_chunks
        if chunks > 1 and n > 1 and num_kv_heads % (n * chunks):
            legal = ", ".join(str(k) for k in range(1, num_kv_heads + 1) if num_kv_heads % (n * k) == 0) or "1"
            expected = f"a number that times {n} ranks divides the {num_kv_heads} key/value heads"
            raise refuse("head_chunks", chunks, expected, f"Choose one of {legal}.")
        check_shared_heads(n, num_heads, num_kv_heads, "schedule ulysses", range(1, num_heads + 1))
