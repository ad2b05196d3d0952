"""The plan type: what every rank holds, moves and attends, step by step.

A plan covers one attention call over one sequence (a batch goes along). Its steps are synchronous in meaning, not in
time: within a step all moves start first, then the attends run beside them; what moved in step t may be attended or
sent on from step t+1 on. Sizes are known to every rank, so nothing is padded and no size is exchanged.

A result for another rank's tokens that is computed in step t may be sent from step t+1 on. A move of a result from the
rank that computed it carries, merged, all that this rank has computed for any part of the block and not sent yet; at
its home it is merged with the rest. A partial gradient that arrives in step t elsewhere than at its home is added there
to what that rank has computed for the same rows, as if that had been computed in step t+1.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from ..layout import Layout
from .mask import Mask, Slice


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
GRADIENTS = RESULTS - {Kind.OUT}
"""Results that are added up wherever they arrive."""


FIELDS = {
    **{Kind.Q: ("q",), Kind.KV: ("kv",), Kind.OUT: ("out", "lse"), Kind.Q_GRAD: ("q", "out", "out", "lse")},
    **{Kind.GRAD: ("out",), Kind.DQ: ("q",), Kind.DKV: ("dkv",)},
}
"""What the tensors are like that blocks of a kind are made of: a gradient is like what it is of."""
NUM_FIELDS = {kind: len(fields) for kind, fields in FIELDS.items()}


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

    def result(self, kind: Kind, origin: int) -> Block:
        """What `origin` computes for it; plans have millions, and this takes a third of the time of `_replace`."""
        return Block(kind, self.home, self.start, self.stop, origin, self.heads)

    def contains(self, other: Block) -> bool:
        """Whether `other` is the same thing, or a piece of it."""
        same = self.kind is other.kind and self.home == other.home and self.origin == other.origin
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


class Attend(NamedTuple):
    """Queries gathered in a row, keys gathered in a row, and which of them see which.

    slices: in numbers of the gathered rows, each pair once, full ones joined where they lie side by side. Blocks of a
    call are all of the same heads. Providers of kernels decide into how many kernel calls it falls (`lower`).
    """

    queries: tuple[Block, ...]
    keys: tuple[Block, ...]
    slices: tuple[Slice, ...]

    @property
    def heads(self) -> Heads:
        return self.queries[0].heads

    @property
    def num_queries(self) -> int:
        return sum(query.stop - query.start for query in self.queries)

    @property
    def num_keys(self) -> int:
        return sum(key.stop - key.start for key in self.keys)

    @property
    def pairs(self) -> int:
        """Query-key pairs computed, for each of its heads."""
        return sum(each.pairs for each in self.slices)

    @property
    def work(self) -> float:
        """Its share of the work of all heads, in query-key pairs."""
        return self.pairs / self.heads.parts

    def part(self, start: int, stop: int) -> Attend | None:
        """What the gathered queries `start..stop-1`, which are of one block, see; over the keys that they see any of.
        None: they see none."""
        slices = [found for each in self.slices if (found := each.cut(start, stop, 0, self.num_keys)) is not None]
        if not slices:
            return None
        q0, q1 = min(each.q_start for each in slices), max(each.q_stop for each in slices)
        k0, k1 = min(each.k_start for each in slices), max(each.k_stop for each in slices)
        (query,) = self.queries
        keys, at = [], 0
        for key in self.keys:
            low, high = max(k0 - at, 0), min(k1 - at, key.tokens)
            if low < high:
                keys.append(key._replace(start=key.start + low, stop=key.start + high))
            at += key.tokens
        query = query._replace(start=query.start + q0, stop=query.start + q1)
        return Attend((query,), tuple(keys), tuple(each.moved(-q0, -k0) for each in slices))

    def __str__(self) -> str:
        seen = ", ".join(map(str, self.slices))
        return f"{'+'.join(map(str, self.queries))} x {'+'.join(map(str, self.keys))}: {seen}"


class Step(NamedTuple):
    """`moves` of all ranks in one global order; `attends[rank]` in the order that rank runs them."""

    moves: tuple[Move, ...]
    attends: tuple[tuple[Attend, ...], ...]


@dataclass(frozen=True)
class Plan:
    """One attention pass, forward or backward, of `mask` over ranks.

    queries, keys: who holds which token; the same layout, but over a cache.
    kept: by rank, what it keeps of other ranks' from forward to backward: KV that it has received, and Q, together with
        their out and lse, that it alone has computed in one call. Empty where nothing is kept.
    sum_in_node: 0, or the ranks of a node (so many neighbours), whose partial gradients for the same rows of a rank of
        another node are added up by one of them, which alone sends them there.
    """

    name: str
    mask: Mask
    queries: Layout
    keys: Layout
    steps: tuple[Step, ...]
    backward: bool = False
    kept: tuple[tuple[Block, ...], ...] = ()
    sum_in_node: int = 0

    @property
    def n(self) -> int:
        return self.queries.n

    def layout_of(self, kind: Kind) -> Layout:
        """The layout that a kind's slots are of."""
        return self.keys if kind in (Kind.KV, Kind.DKV) else self.queries

    def sends(self, rank: int) -> list[list[Move]]:
        """By step, the moves from a rank."""
        return self._moves[0][rank]

    def receives(self, rank: int) -> list[list[Move]]:
        """By step, the moves to a rank."""
        return self._moves[1][rank]

    @cached_property
    def _moves(self) -> tuple[dict[int, list[list[Move]]], dict[int, list[list[Move]]]]:
        def none() -> list[list[Move]]:
            return [[] for _ in self.steps]

        sends: dict[int, list[list[Move]]] = defaultdict(none)
        receives: dict[int, list[list[Move]]] = defaultdict(none)
        for t, step in enumerate(self.steps):
            for move in step.moves:
                sends[move[1]][t].append(move)
                receives[move[2]][t].append(move)
        return sends, receives

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

    def keeps(self, rank: int, blocks: tuple[Block, ...]) -> bool:
        """Whether `rank` keeps some blocks of a call as it had them in forward, its own among other ranks'."""
        if not self.kept:
            return False
        away = [block for block in blocks if block.home != rank]
        return bool(away) and all(
            any(kept.contains(block) for kept in self.kept_of(rank, block.kind, block.home)) for block in away
        )

    def inputs(self, attend: Attend, rank: int) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
        """The queries and the keys that `rank` has to hold to run one of its calls, beside what it keeps.

        In backward queries come with their outputs and gradients; of kept ones only the gradient of out is needed.
        """
        if not self.backward:
            return attend.queries, attend.keys
        kind = Kind.GRAD if self.keeps(rank, attend.queries) else Kind.Q_GRAD
        keys = () if self.keeps(rank, attend.keys) else attend.keys
        return tuple([Block(kind, *query[1:]) for query in attend.queries]), keys

    def results_away(self, attend: Attend, rank: int) -> list[Block]:
        """What `rank` computes in one of its calls for other ranks and so has to send: keys first, in their order."""
        if not self.backward:
            return [query.result(Kind.OUT, rank) for query in attend.queries if query.home != rank]
        away = [key.result(Kind.DKV, rank) for key in attend.keys if key.home != rank]
        return away + [query.result(Kind.DQ, rank) for query in attend.queries if query.home != rank]

    def pairs(self, rank: int) -> float:
        """Query-key pairs that `rank` computes, each counted by its share of the heads."""
        return sum(attend.work for step in self.steps for attend in step.attends[rank])

    @cached_property
    def _pairs(self) -> list[float]:
        """By rank; with many ranks a sum over thousands of attends."""
        return [self.pairs(rank) for rank in range(self.n)]

    def imbalance_pct(self, pairs_per_token: float = 0.0) -> float:
        """By how many percent the busiest rank's work is more than the average.

        Args:
            pairs_per_token: what a token takes beside attention, in the time of so many pairs; 0 for attention alone.
        """
        work = [pairs + pairs_per_token * self.queries.num_tokens(rank) for rank, pairs in enumerate(self._pairs)]
        return 100 * (max(work) * self.n / sum(work) - 1) if sum(work) else 0.0

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
