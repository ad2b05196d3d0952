"""The plan type: what every rank holds, moves and attends, step by step.

A plan covers one attention call over one sequence (a batch goes along). Its steps are synchronous in meaning, not in
time: within a step all moves start first, then the attends run beside them; what moved in step t may be attended or
sent on from step t+1 on. Sizes are known to every rank, so nothing is padded and no size is exchanged.

A result for another rank's tokens that is computed in step t may be sent from step t+1 on. A move of a result from the
rank that computed it carries, merged, all that this rank has computed for any part of the block and not sent yet; at
its home it is merged with the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from ..layout import Layout


class Kind(StrEnum):
    """What a block holds, per token of its span."""

    Q = "q"  # queries
    KV = "kv"  # keys and values
    OUT = "out"  # partial (out, lse) of queries computed away from home
    Q_GRAD = "q_grad"  # backward: (q, out, lse, grad of out), what a helper needs of queries that are not its own
    GRAD = "grad"  # backward: grad of out alone, of queries that are kept together with their out and lse
    DQ = "dq"  # backward: partial gradient of queries
    DKV = "dkv"  # backward: partial gradient of keys and values


RESULTS = frozenset({Kind.OUT, Kind.DQ, Kind.DKV})
"""Kinds that are computed away from home and travel back to it."""


class Heads(NamedTuple):
    """Part `part` of `parts` equal parts of the attention heads."""

    part: int = 0
    parts: int = 1

    def covers(self, other: Heads) -> bool:
        """Whether `other` is this part, or a part of it."""
        return other.parts % self.parts == 0 and other.part // (other.parts // self.parts) == self.part


ALL_HEADS = Heads()


class Block(NamedTuple):
    """Slots `start..stop-1` of rank `home`, for `heads`. `origin` is the rank that computed a result, else -1."""

    kind: Kind
    home: int
    start: int
    stop: int
    origin: int = -1
    heads: Heads = ALL_HEADS

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def contains(self, other: Block) -> bool:
        """Whether `other` is the same thing, or a piece of it."""
        same = (self.kind, self.home, self.origin) == (other.kind, other.home, other.origin)
        return same and self.start <= other.start and other.stop <= self.stop and self.heads.covers(other.heads)

    def overlaps(self, other: Block) -> bool:
        """Whether some token is in both, in some head. Of blocks of one home."""
        return (
            self.start < other.stop
            and other.start < self.stop
            and (self.heads.covers(other.heads) or other.heads.covers(self.heads))
        )

    def __str__(self) -> str:
        by = f" by {self.origin}" if self.origin >= 0 else ""
        part = f" heads {self.heads.part + 1}/{self.heads.parts}" if self.heads.parts > 1 else ""
        return f"{self.kind}{self.home}[{self.start}:{self.stop}]{part}{by}"


class Move(NamedTuple):
    """One message. Moves between the same two ranks in one step are matched in the order the step lists them."""

    block: Block
    source: int
    destination: int
    channel: int = 0


class Attend(NamedTuple):
    """One kernel call: these queries see these keys (all of them, or causally: query i sees keys 0..i of the call).

    `causal` needs as many keys as queries. Blocks listed together are one contiguous sequence for the kernel; all of a
    call are of the same heads.
    """

    queries: tuple[Block, ...]
    keys: tuple[Block, ...]
    causal: bool

    @property
    def heads(self) -> Heads:
        return self.queries[0].heads

    def inputs(self, backward: bool) -> tuple[Block, ...]:
        """What a rank has to hold to run the call; in backward queries come with their outputs and gradients."""
        kind = Kind.Q_GRAD if backward else Kind.Q
        if all(query.kind is kind for query in self.queries):
            return self.queries + self.keys
        return (*(query._replace(kind=kind) for query in self.queries), *self.keys)

    @property
    def num_queries(self) -> int:
        return sum(query.tokens for query in self.queries)

    @property
    def num_keys(self) -> int:
        return sum(key.tokens for key in self.keys)

    @property
    def pairs(self) -> int:
        """Query-key pairs computed, for each of its heads."""
        q = self.num_queries
        return q * (q + 1) // 2 if self.causal else q * self.num_keys

    @property
    def work(self) -> float:
        """Its share of the work of all heads, in query-key pairs."""
        return self.pairs / self.heads.parts

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{'+'.join(map(str, self.queries))} x {'+'.join(map(str, self.keys))} {mask}"


class Step(NamedTuple):
    """`moves` of all ranks in one global order; `attends[rank]` in the order that rank runs them."""

    moves: tuple[Move, ...]
    attends: tuple[tuple[Attend, ...], ...]


@dataclass(frozen=True)
class Plan:
    """One attention pass (forward, or backward with `backward=True`) over `layout`, under `causal` or full mask.

    buffers: per kind, the most tokens that any rank's buffers hold at once, beside what is kept: of other ranks'
        blocks, of results on their way, and of its own where they lie among others' for a call.
    kept: by rank, what it keeps of other ranks' from forward to backward: KV that it has received, and Q, together with
        their out and lse, that it alone has computed in one call. Empty where nothing is kept.
    """

    name: str
    layout: Layout
    causal: bool
    steps: tuple[Step, ...]
    buffers: tuple[tuple[Kind, int], ...] = ()
    backward: bool = False
    kept: tuple[tuple[Block, ...], ...] = ()

    @property
    def n(self) -> int:
        return self.layout.n

    def num_slots(self, kind: Kind, rank: int) -> int:
        """Slots of `rank`'s own tensors of an input `kind`."""
        return self.layout.num_tokens(rank)

    def runs(self, block: Block) -> list[range]:
        """The tokens of a block in the order of its slots: a query sees the keys whose tokens are not above its own."""
        runs, start = [], 0
        for span in self.layout.spans[block.home]:
            runs.append(span[max(block.start - start, 0) : max(block.stop - start, 0)])
            start += len(span)
        return [run for run in runs if len(run)]

    def buffer_tokens(self, kind: Kind) -> int:
        return dict(self.buffers).get(kind, 0)

    def keeps(self, rank: int, block: Block) -> bool:
        """Whether all of another rank's `block` is in what `rank` keeps."""
        return any(kept.contains(block) for kept in self.kept_of(rank, block.kind, block.home))

    def kept_of(self, rank: int, kind: Kind, home: int) -> tuple[Block, ...]:
        """What `rank` keeps of a kind of another rank's."""
        return self._kept.get((rank, kind, home), ())

    @cached_property
    def _kept(self) -> dict[tuple[int, Kind, int], tuple[Block, ...]]:
        found: dict[tuple[int, Kind, int], tuple[Block, ...]] = {}
        for rank, blocks in enumerate(self.kept):
            for block in blocks:
                key = rank, block.kind, block.home
                found[key] = (*found.get(key, ()), block)
        return found

    def keeps_queries(self, attend: Attend, rank: int) -> bool:
        """Whether `rank` keeps the call's queries, out and lse as it had them in forward, its own among them."""
        return self._keeps_all(attend.queries, rank)

    def keeps_keys(self, attend: Attend, rank: int) -> bool:
        """Whether `rank` keeps the call's keys and values as it had them in forward, its own among them."""
        return self._keeps_all(attend.keys, rank)

    def _keeps_all(self, blocks: tuple[Block, ...], rank: int) -> bool:
        if not self.kept:
            return False
        away = [block for block in blocks if block.home != rank]
        return bool(away) and all(self.keeps(rank, block) for block in away)

    def inputs(self, attend: Attend, rank: int) -> tuple[Block, ...]:
        """What `rank` has to hold to run one of its calls, beside what it keeps: queries first."""
        if not self.backward:
            return attend.inputs(False)
        queries = Kind.GRAD if self.keeps_queries(attend, rank) else Kind.Q_GRAD
        keys = () if self.keeps_keys(attend, rank) else attend.keys
        return (*(query._replace(kind=queries) for query in attend.queries), *keys)

    def pairs(self, rank: int) -> float:
        """Query-key pairs that `rank` computes, each counted by its share of the heads."""
        return sum(attend.work for step in self.steps for attend in step.attends[rank])

    def visible_pairs(self) -> int:
        """Query-key pairs that the mask shows, over the whole sequence."""
        length = self.layout.length
        return length * (length + 1) // 2 if self.causal else length * length

    def idle_fraction(self) -> float:
        """Share of rank-time spent waiting if every step lasted as long as its busiest rank."""
        busiest = sum(max(sum(a.work for a in attends) for attends in step.attends) for step in self.steps)
        return 1 - sum(map(self.pairs, range(self.n))) / (self.n * busiest) if busiest else 0.0

    def idle_slots(self) -> Fraction:
        """Rank-steps without a kernel call between the first and the last one, as a share of n x n.

        The measure of DistFlashAttn (section 3.2), which counts the diagonal block as a whole one: (n^2 - n) / 2n^2 for
        the plain ring.
        """
        busy = [t for t, step in enumerate(self.steps) if any(step.attends)]
        idle = (
            sum(not attends for t in range(busy[0], busy[-1] + 1) for attends in self.steps[t].attends) if busy else 0
        )
        return Fraction(idle, self.n * self.n)
