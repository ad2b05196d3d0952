"""The plan type: what every rank holds, moves and attends, step by step.

A plan covers one attention call over one sequence (a batch goes along). Its steps are synchronous in meaning, not in
time: within a step all moves start first, then the attends run beside them; what moved in step t may be attended or
sent on from step t+1 on. A partial result computed in step t may be sent from step t+1 on and is merged at its home
when it arrives. Sizes are known to every rank, so nothing is padded and no size is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ..layout import Layout


class Kind(StrEnum):
    """What a block holds, per token of its span."""

    Q = "q"  # queries
    KV = "kv"  # keys and values
    OUT = "out"  # partial (out, lse) of queries computed away from home
    Q_GRAD = "q_grad"  # backward: (q, out, lse, grad of out), what a helper needs of queries that are not its own
    DQ = "dq"  # backward: partial gradient of queries
    DKV = "dkv"  # backward: partial gradient of keys and values


RESULTS = frozenset({Kind.OUT, Kind.DQ, Kind.DKV})
"""Kinds that are computed away from home and travel back to it."""


class Block(NamedTuple):
    """Slots `start..stop-1` of rank `home`. `origin` is the rank that computed it, for results (-1 otherwise)."""

    kind: Kind
    home: int
    start: int
    stop: int
    origin: int = -1

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def contains(self, other: Block) -> bool:
        """Whether `other` is the same thing, or a piece of it."""
        same = (self.kind, self.home, self.origin) == (other.kind, other.home, other.origin)
        return same and self.start <= other.start and other.stop <= self.stop

    def __str__(self) -> str:
        by = f" by {self.origin}" if self.origin >= 0 else ""
        return f"{self.kind}{self.home}[{self.start}:{self.stop}]{by}"


class Move(NamedTuple):
    """One message. Moves between the same two ranks in one step are matched in the order the step lists them."""

    block: Block
    source: int
    destination: int
    channel: int = 0


class Attend(NamedTuple):
    """One kernel call: these queries see these keys (all of them, or causally: query i sees keys 0..i of the call).

    `causal` needs as many keys as queries. Keys of several blocks are one contiguous sequence for the kernel.
    """

    query: Block
    keys: tuple[Block, ...]
    causal: bool

    @property
    def num_keys(self) -> int:
        return sum(key.tokens for key in self.keys)

    @property
    def pairs(self) -> int:
        """Query-key pairs computed."""
        q = self.query.tokens
        return q * (q + 1) // 2 if self.causal else q * self.num_keys

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.query} x {'+'.join(map(str, self.keys))} {mask}"


class Step(NamedTuple):
    """`moves` of all ranks in one global order; `attends[rank]` in the order that rank runs them."""

    moves: tuple[Move, ...]
    attends: tuple[tuple[Attend, ...], ...]


@dataclass(frozen=True)
class Plan:
    """One attention pass (forward, or backward with `backward=True`) over `layout`, under `causal` or full mask.

    `buffers` states, per kind, the most tokens of other ranks' blocks (and of results on their way) that any rank
    holds at once.
    """

    name: str
    layout: Layout
    causal: bool
    steps: tuple[Step, ...]
    buffers: tuple[tuple[Kind, int], ...] = ()
    backward: bool = False

    @property
    def n(self) -> int:
        return self.layout.n

    def buffer_tokens(self, kind: Kind) -> int:
        return dict(self.buffers).get(kind, 0)

    def pairs(self, rank: int) -> int:
        """Query-key pairs that `rank` computes."""
        return sum(attend.pairs for step in self.steps for attend in step.attends[rank])

    def visible_pairs(self) -> int:
        """Query-key pairs that the mask shows, over the whole sequence."""
        length = self.layout.length
        return length * (length + 1) // 2 if self.causal else length * length

    def idle_fraction(self) -> float:
        """Share of rank-time spent waiting if every step lasted as long as its busiest rank."""
        busiest = sum(max(sum(a.pairs for a in attends) for attends in step.attends) for step in self.steps)
        return 1 - sum(map(self.pairs, range(self.n))) / (self.n * busiest) if busiest else 0.0
