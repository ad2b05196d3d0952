"""How long blocks of other ranks lie in a rank's buffers, and which of them share one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter

from .plan import RESULTS, Block, Heads, Kind, Plan


@dataclass(frozen=True)
class LiveRange:
    """Blocks of one kind and the same heads that reach a rank in one step lie in one buffer, in the step's order of
    moves.

    Where ranks share the heads, a call attends them together with blocks of the rank's own: these are copied there, in
    the order of the call. The buffer is taken from the start of step `first` (the receive is posted) to the end of step
    `last`. kept: it is held beyond the plan, for backward.
    """

    kind: Kind
    blocks: tuple[Block, ...]
    first: int
    last: int
    kept: bool = False

    @property
    def tokens(self) -> int:
        return sum(block.tokens for block in self.blocks)

    @property
    def heads(self) -> Heads:
        return self.blocks[0].heads


def live_ranges(plan: Plan, rank: int) -> list[LiveRange]:
    """Those of one rank, in order of arrival. Results stay until the step after they arrive, when they are merged; a
    rank that only passes them on keeps them until it has."""
    uses, gathered = _uses(plan, rank), _gathered(plan, rank)
    found: list[LiveRange] = []
    for t, moves in enumerate(plan.receives(rank)):
        arriving: dict[tuple[Kind, Heads, bool], list[Block]] = {}
        for block, _, _ in moves:
            kept = not plan.backward and any(map(block.contains, plan.kept_of(rank, block.kind, block.home)))
            arriving.setdefault((block.kind, block.heads, kept), []).append(block)
        for (kind, _, kept), blocks in arriving.items():
            last = max(_last_use(block, uses, t + (kind in RESULTS)) for block in blocks)
            together = tuple(gathered.get((kind, frozenset(blocks)), blocks)) if gathered else tuple(blocks)
            found.append(LiveRange(kind, together, t, len(plan.steps) - 1 if kept else last, kept))
    return found


def _gathered(plan: Plan, rank: int) -> dict[tuple[Kind, frozenset[Block]], tuple[Block, ...]]:
    """By the blocks of other ranks among them: parts of the heads of several ranks, its own too, that a call attends
    together."""
    found: dict[tuple[Kind, frozenset[Block]], tuple[Block, ...]] = {}
    for step in plan.steps:
        for attend in step.attends[rank]:
            if attend.heads.parts > 1:
                for blocks in plan.inputs(attend, rank):
                    away = frozenset(block for block in blocks if block.home != rank)
                    if 0 < len(away) < len(blocks):
                        found.setdefault((blocks[0].kind, away), blocks)
    return found


def assign(ranges: Sequence[LiveRange]) -> tuple[list[int], list[int]]:
    """Give every live range of a rank one of as few buffers as their times allow.

    Returns:
        by range, its buffer, and until which step that was taken before (-1: never).
    """
    alike: list[tuple[Kind, int, bool]] = []
    busy: list[int] = []
    buffer_of, busy_until = [], []
    for each in ranges:
        kind = (each.kind, each.heads.parts, each.kept)
        free = [i for i, other in enumerate(alike) if other == kind and busy[i] < each.first]
        if free:
            buffer = min(free, key=lambda i: busy[i])  # the one free for longest: least to wait for
        else:
            buffer = len(alike)
            alike.append(kind)
            busy.append(-1)
        buffer_of.append(buffer)
        busy_until.append(busy[buffer])
        busy[buffer] = each.last
    return buffer_of, busy_until


_Uses = dict[tuple[Kind, int], list[tuple[int, int, Block]]]
_start = itemgetter(0)


def _uses(plan: Plan, rank: int) -> _Uses:
    """By kind and home: (start, step, block) of what a rank attends or sends on, in the order of starts."""
    uses: _Uses = {}
    for t, step in enumerate(plan.steps):
        for attend in step.attends[rank]:
            for blocks in plan.inputs(attend, rank):
                for block in blocks:
                    if block.home != rank:
                        uses.setdefault((block.kind, block.home), []).append((block.start, t, block))
    for t, moves in enumerate(plan.sends(rank)):
        for block, _, _ in moves:
            if block.home != rank:
                uses.setdefault((block.kind, block.home), []).append((block.start, t, block))
    for each in uses.values():
        each.sort(key=_start)
    return uses


def _last_use(block: Block, uses: _Uses, least: int) -> int:
    found = uses.get((block.kind, block.home))
    if found is None:
        return least
    within = takewhile(lambda use: use[0] < block.stop, found[bisect_left(found, block.start, key=_start) :])
    return max((t for _, t, used in within if block.contains(used)), default=least)
