"""The plan type: what every rank holds, moves and attends to, step by step.

A plan covers one attention call over one sequence (all sequences of a batch use the same plan). Its steps are
synchronous in meaning, not in time. Within a step all moves start first, then the attends run beside them. A block that
moves in step t may be attended to or sent on from step t+1 on. Every rank knows all sizes, so nothing is padded and no
size is exchanged.

A result for another rank's tokens that is computed in step t may be sent from step t+1 on. If the rank that computed
results for a block sends them, the message carries, merged, all results for any part of the block that this rank has
computed and not sent yet. The home rank merges what arrives with its own results. A partial gradient that arrives in
step t at a rank other than its home is added there to what that rank has computed for the same rows, as if it had been
computed in step t+1.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Protocol

from ..layout import Layout
from .mask import Mask
from .slices import Slice, merge_spans


class Kind(StrEnum):
    """The content of a block, per token of its span."""

    Q = "q"  # queries
    KV = "kv"  # keys and values
    OUT = "out"  # partial (out, lse) of queries, computed away from home
    Q_GRAD = "q_grad"  # backward: (q, out, lse, grad of out), which a rank needs to attend with another rank's queries
    GRAD = "grad"  # backward: grad of out alone, for queries that are kept together with their out and lse
    DQ = "dq"  # backward: partial gradient of queries
    DKV = "dkv"  # backward: partial gradient of keys and values


RESULTS = frozenset({Kind.OUT, Kind.DQ, Kind.DKV})
"""The kinds that are computed away from home and travel back to it."""
GRADIENTS = RESULTS - {Kind.OUT}
"""The results that are added up wherever they arrive."""


FIELDS = {
    **{Kind.Q: ("q",), Kind.KV: ("kv",), Kind.OUT: ("out", "lse"), Kind.Q_GRAD: ("q", "out", "out", "lse")},
    **{Kind.GRAD: ("out",), Kind.DQ: ("q",), Kind.DKV: ("dkv",)},
}
"""The tensors of a block of each kind, by the name of a tensor of the same shape: a gradient has its tensor's shape."""
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
        """Return the block of results that `origin` computes for these tokens.

        Plans have millions of results, and this takes a third of the time of `_replace`.
        """
        return Block(kind, self.home, self.start, self.stop, origin, self.heads)

    def contains(self, other: Block) -> bool:
        """Whether `other` is this block or a piece of it."""
        same = self.kind is other.kind and self.home == other.home and self.origin == other.origin
        return same and self.start <= other.start and other.stop <= self.stop and self.heads.covers(other.heads)

    def overlaps(self, other: Block) -> bool:
        """Whether two blocks of one home share a token in some head."""
        rows = self.start < other.stop and other.start < self.stop
        return rows and (self.heads.covers(other.heads) or other.heads.covers(self.heads))

    def __str__(self) -> str:
        by = f" by {self.origin}" if self.origin >= 0 else ""
        part = f" heads {self.heads.part + 1}/{self.heads.parts}" if self.heads.parts > 1 else ""
        return f"{self.kind}{self.home}[{self.start}:{self.stop}]{part}{by}"


class Move(NamedTuple):
    """One message. Moves between the same two ranks in one step are matched in the order of the step's list."""

    block: Block
    source: int
    destination: int


class Attend(NamedTuple):
    """One attention call: gathered rows of queries, gathered rows of keys, and the slices that see each other.

    slices: in row numbers, each pair once; adjacent full slices are joined. All blocks of a call have the same heads.
        `record` decides into how many kernel calls it is divided, by what the kernel provider supports.
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
        """The number of query-key pairs that each head computes."""
        return sum(each.pairs for each in self.slices)

    def halves(self) -> tuple[tuple[Attend, ...], tuple[Attend, ...]]:
        """Divide the queries, which must be of one block, into two calls; a half that sees no keys has none."""
        middle = self.num_queries // 2
        front, back = self._part(0, middle), self._part(middle, self.num_queries)
        return ((front,) if front else ()), ((back,) if back else ())

    def _part(self, start: int, stop: int) -> Attend | None:
        """Return the call of rows `start..stop-1` of the queries with the keys that they see."""
        slices = [piece for each in self.slices if (piece := each.cut(start, stop, 0, self.num_keys)) is not None]
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
    """`moves` of all ranks in one global order; `attends[rank]` in the order in which that rank runs them."""

    moves: tuple[Move, ...]
    attends: tuple[tuple[Attend, ...], ...]


@dataclass(frozen=True)
class Plan:
    """One attention pass, forward or backward, of `mask` over ranks.

    queries, keys: the layouts of queries and keys; they are the same, except over a cache.
    kept: indexed by rank, the blocks of other ranks that it keeps from forward to backward: KV that it has received,
        and Q that it alone has attended with in one call, together with their out and lse. Empty if nothing is kept.
    sum_in_node: 0, or the number of (neighbouring) ranks of a node. Then their partial gradients for the same rows of a
        rank in another node are added up by one of them, which alone sends them there.
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
        """Return the layout of the slots of a kind."""
        return self.keys if kind in (Kind.KV, Kind.DKV) else self.queries

    def calls(self) -> Iterator[tuple[int, int, Attend]]:
        """Yield (step, rank, call) of all calls, in the order of steps and ranks."""
        for t, step in enumerate(self.steps):
            for rank, attends in enumerate(step.attends):
                for attend in attends:
                    yield t, rank, attend

    def sends(self, rank: int) -> list[list[Move]]:
        """Return the moves from `rank`, indexed by step."""
        return self._moves[0][rank]

    def receives(self, rank: int) -> list[list[Move]]:
        """Return the moves to `rank`, indexed by step."""
        return self._moves[1][rank]

    @cached_property
    def _moves(self) -> tuple[dict[int, list[list[Move]]], dict[int, list[list[Move]]]]:
        sends: dict[int, list[list[Move]]] = defaultdict(lambda: [[] for _ in self.steps])
        receives: dict[int, list[list[Move]]] = defaultdict(lambda: [[] for _ in self.steps])
        for t, step in enumerate(self.steps):
            for move in step.moves:
                sends[move[1]][t].append(move)
                receives[move[2]][t].append(move)
        return sends, receives

    def kept_of(self, rank: int, kind: Kind, home: int) -> tuple[Block, ...]:
        """Return the blocks of a kind and a home that `rank` keeps."""
        return self._kept.get((rank, kind, home), ())

    @cached_property
    def _kept(self) -> dict[tuple[int, Kind, int], tuple[Block, ...]]:
        kept: dict[tuple[int, Kind, int], tuple[Block, ...]] = {}
        for rank, blocks in enumerate(self.kept):
            for block in blocks:
                key = rank, block.kind, block.home
                kept[key] = (*kept.get(key, ()), block)
        return kept

    def gathered_with_own(self, rank: int) -> dict[tuple[Kind, frozenset[Block]], tuple[Block, ...]]:
        """Return the inputs of calls that join part of a rank's heads with other blocks, keyed by the others."""
        found: dict[tuple[Kind, frozenset[Block]], tuple[Block, ...]] = {}
        for step in self.steps:
            for attend in step.attends[rank]:
                for blocks in self.inputs(attend, rank) if attend.heads.parts > 1 else ():
                    away = frozenset(block for block in blocks if block.home != rank)
                    if 0 < len(away) < len(blocks):
                        found.setdefault((blocks[0].kind, away), blocks)
        return found

    def keeps(self, rank: int, blocks: tuple[Block, ...]) -> bool:
        """Whether `rank` keeps the blocks of a call from forward, its own among other ranks'."""
        if not self.kept:
            return False
        away = [block for block in blocks if block.home != rank]
        return bool(away) and all(
            any(kept.contains(block) for kept in self.kept_of(rank, block.kind, block.home)) for block in away
        )

    def inputs(self, attend: Attend, rank: int) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
        """Return the queries and the keys that `rank` must hold to run a call, besides what it keeps.

        In backward, queries come with their outputs and gradients; of kept ones only the gradient of out is needed.
        """
        if not self.backward:
            return attend.queries, attend.keys
        kind = Kind.GRAD if self.keeps(rank, attend.queries) else Kind.Q_GRAD
        keys = () if self.keeps(rank, attend.keys) else attend.keys
        return tuple([Block(kind, *query[1:]) for query in attend.queries]), keys

    def remote_results(self, attend: Attend, rank: int) -> list[Block]:
        """Return the results of a call that `rank` must send to other ranks, in their order, results of keys first."""
        if not self.backward:
            return [query.result(Kind.OUT, rank) for query in attend.queries if query.home != rank]
        away = [key.result(Kind.DKV, rank) for key in attend.keys if key.home != rank]
        return away + [query.result(Kind.DQ, rank) for query in attend.queries if query.home != rank]


class Links(Protocol):
    """What modes and backward plans need to know of a `config.cluster.Cluster`; plans know no rates.

    Rank r is rank `r % ranks_per_node` of node `r // ranks_per_node`.
    """

    @property
    def nodes(self) -> int: ...

    @property
    def ranks_per_node(self) -> int: ...

    @property
    def network_is_slower(self) -> bool:
        """Whether a rank's share of the network is slower than its links within its node. False for one node."""


def fetch_moves(attends: Iterable[tuple[Attend, ...]]) -> list[Move]:
    """Return the moves that fetch the blocks of other ranks for calls, which are indexed by rank, from their homes."""
    calls = [(rank, call) for rank, some in enumerate(attends) for call in some]
    return [Move(each, each.home, r) for r, call in calls for each in call.queries + call.keys if each.home != r]


def return_moves(steps: Iterable[Step]) -> list[Move]:
    """Return the moves that send outputs home: one for each rank that computed them, home and part of the heads."""
    rows: dict[tuple[int, int, Heads], tuple[int, int]] = {}
    for step in steps:
        for rank, attends in enumerate(step.attends):
            for _, home, start, stop, _, heads in (query for attend in attends for query in attend.queries):
                if home != rank:
                    low, high = rows.get((rank, home, heads), (start, stop))
                    rows[rank, home, heads] = min(start, low), max(stop, high)
    return [Move(Block(Kind.OUT, key[1], *rows[key], key[0], key[2]), *key[:2]) for key in sorted(rows)]


def trim(plan: Plan) -> Plan:
    """Return the plan whose moves of inputs carry only the rows that their receiver attends to or passes on.

    A window then costs the bytes of a window in every mode. A mode may pass blocks around without checking who sees
    them: most masks leave little to see for the last ranks on the way.
    """
    needs: dict[tuple[int, Kind, int], list[Block]] = {}  # what later steps use, keyed by (rank, kind, home)
    steps: list[Step] = []
    for step in reversed(plan.steps):
        needed = tuple(piece for move in step.moves for piece in _needed(move, needs))
        steps.append(step._replace(moves=needed))
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for blocks in plan.inputs(attend, rank):
                    for block in blocks:
                        needs.setdefault((rank, block.kind, block.home), []).append(block)
        for block, source, _ in needed:
            needs.setdefault((source, block.kind, block.home), []).append(block)
    return replace(plan, steps=tuple(reversed(steps)))


def _needed(move: Move, needs: dict[tuple[int, Kind, int], list[Block]]) -> Iterator[Move]:
    block = move.block
    used = needs.get((move.destination, block.kind, block.home), ())
    if block.kind in RESULTS or block in used:
        yield move
        return
    spans = [(max(block.start, each.start), min(block.stop, each.stop)) for each in used if block.overlaps(each)]
    for start, stop in merge_spans(spans):
        whole = (start, stop) == (block.start, block.stop)
        yield move if whole else move._replace(block=block._replace(start=start, stop=stop))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, which would scan the millions of small tuples of a large plan and find no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
