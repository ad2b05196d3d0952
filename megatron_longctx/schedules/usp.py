"""USP: Ulysses inside groups of ranks, any ring mode between the groups (Fang and Zhao 2024).

The ranks of a group exchange tokens for heads; then rank i of every group runs, for its part of the heads, the plan of
a ring whose members are groups. So a ring has fewer, larger blocks, and no more ranks share the heads than there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from ..layout import Layout
from .plan import RESULTS, Attend, Block, Heads, Kind, Move, Plan, Step
from .prune import prune


def usp(layout: Layout, causal: bool, sharing: int, outer: Callable[[Layout, bool], Plan]) -> Plan:
    """Step 0 exchanges queries and keys inside the groups, the outer plan runs, the last step returns the outputs.

    Args:
        layout: one in which neighbouring ranks hold neighbouring tokens (contiguous, zigzag).
        sharing: ranks of a group, neighbours in rank order, that share the heads; it must fit their number as for
            `ulysses`.
        outer: plans attention among groups, given which tokens each of them holds.

    Raises:
        ValueError: `sharing` does not divide the ranks.
    """
    n = layout.n
    if sharing < 1 or n % sharing:
        legal = ", ".join(str(k) for k in range(1, n + 1) if n % k == 0)
        raise ValueError(f"inner_size={sharing}: expected a divisor of the {n} ranks. Choose one of {legal}.")
    if sharing == 1:
        return replace(outer(layout, causal), name="usp")
    groups = [_Group(layout, range(first, first + sharing)) for first in range(0, n, sharing)]
    plan = outer(Layout(layout.name, layout.length, tuple(group.spans for group in groups)), causal)
    lifted = (_lifted(step, groups, sharing) for step in plan.steps)
    idle: tuple[tuple[Attend, ...], ...] = ((),) * n
    steps = (Step(tuple(_exchange(groups)), idle), *lifted, Step(tuple(_returns(layout, groups)), idle))
    return prune(Plan("usp", layout, causal, steps))


class _Segment(NamedTuple):
    """Slots `start..stop-1` of a group are slots from `member_start` on of rank `member`."""

    start: int
    stop: int
    member: int
    member_start: int


class _Group:
    """Ranks that hold their tokens together, as one rank of the outer plan."""

    def __init__(self, layout: Layout, ranks: range) -> None:
        self.ranks = ranks
        self.segments: list[_Segment] = []
        spans = []
        offset = dict.fromkeys(ranks, 0)
        for pieces in zip(*(layout.spans[rank] for rank in ranks), strict=True):
            held = sorted((piece.start, rank, piece) for rank, piece in zip(ranks, pieces, strict=True) if len(piece))
            span = range(held[0][2].start, held[-1][2].stop) if held else range(0)
            if len(span) != sum(map(len, pieces)):
                raise ValueError(
                    f"layout {layout.name}: expected ranks {ranks[0]}..{ranks[-1]} to hold neighbouring tokens. "
                    "Use the contiguous or the zigzag layout."
                )
            for _, rank, piece in held:
                at = self.num_tokens
                self.segments.append(_Segment(at, at + len(piece), rank, offset[rank]))
                offset[rank] += len(piece)
            spans.append(span)
        self.spans = tuple(spans)

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    def split(self, block: Block, heads: Heads, origin: int = -1) -> list[Block]:
        """A block of the group as blocks of its members, in the order of its slots."""
        found = []
        for start, stop, member, member_start in self.segments:
            low, high = max(start, block.start), min(stop, block.stop)
            if low < high:
                at = member_start - start
                found.append(Block(block.kind, member, at + low, at + high, origin, heads))
        return found

    def everything(self, kind: Kind, heads: Heads) -> list[Block]:
        return self.split(Block(kind, -1, 0, self.num_tokens), heads)


def _lifted(step: Step, groups: list[_Group], sharing: int) -> Step:
    """A step of groups as one of ranks: member i of each does it for part i of the heads."""
    moves, attends = [], []
    for i in range(sharing):
        heads = Heads(i, sharing)
        for block, source, destination, channel in step.moves:
            sender, receiver = groups[source].ranks[i], groups[destination].ranks[i]
            away = block.kind in RESULTS  # these go straight to the members whose tokens they are
            for piece in groups[block.home].split(block, heads, sender if away else -1):
                moves.append(Move(piece, sender, piece.home if away else receiver, channel))
    for group, calls in zip(groups, step.attends, strict=True):
        for i in range(len(group.ranks)):
            heads = Heads(i, sharing)
            attends.append(
                tuple(
                    Attend(_split(groups, call.queries, heads), _split(groups, call.keys, heads), call.causal)
                    for call in calls
                )
            )
    return Step(tuple(moves), tuple(attends))


def _split(groups: list[_Group], blocks: Iterable[Block], heads: Heads) -> tuple[Block, ...]:
    return tuple(piece for block in blocks for piece in groups[block.home].split(block, heads))


def _exchange(groups: list[_Group]) -> Iterable[Move]:
    for group in groups:
        for i, rank in enumerate(group.ranks):
            for kind in (Kind.Q, Kind.KV):
                pieces = group.everything(kind, Heads(i, len(group.ranks)))
                yield from (Move(piece, piece.home, rank) for piece in pieces if piece.home != rank)


def _returns(layout: Layout, groups: list[_Group]) -> Iterable[Move]:
    for group in groups:
        for i, rank in enumerate(group.ranks):
            for home in group.ranks:
                if home != rank and layout.num_tokens(home):
                    heads = Heads(i, len(group.ranks))
                    yield Move(Block(Kind.OUT, home, 0, layout.num_tokens(home), rank, heads), rank, home)
