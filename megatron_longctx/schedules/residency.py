"""When blocks of other ranks sit in a rank's buffers: one pure computation for `verify`, the executor and prices."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import takewhile
from math import ceil
from operator import itemgetter

from .plan import RESULTS, Block, Heads, Kind, Plan


@dataclass(frozen=True)
class Stay:
    """Blocks of one kind and the same heads that reach a rank in one step share a buffer, in the step's order of moves.

    Where ranks share the heads, a call attends them together with blocks of the rank's own: these are copied there, in
    the order of the call.
    The buffer is taken from the start of step `first` (the receive is posted) to the end of step `last`. kept: it is
    held beyond the plan, for backward.
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


@contextmanager
def collector_paused() -> Iterator[None]:
    """Plans of many ranks are millions of small tuples without cycles, over which the collector would go in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def stays(plan: Plan) -> list[list[Stay]]:
    """The stays of every rank, in order of arrival. Results stay until the step after they arrive, when they merge.

    A rank that only passes results on keeps them until it has.
    """
    uses, mixed = _uses(plan), _mixed(plan)
    result: list[list[Stay]] = [[] for _ in range(plan.n)]
    for t, step in enumerate(plan.steps):
        arriving: dict[tuple[int, Kind, Heads, bool], list[Block]] = {}
        for block, _, rank, _ in step.moves:
            kept = not plan.backward and any(map(block.contains, plan.kept_of(rank, block.kind, block.home)))
            arriving.setdefault((rank, block.kind, block.heads, kept), []).append(block)
        for (rank, kind, _, kept), blocks in arriving.items():
            last = max(_last_use(block, uses[rank], t + (kind in RESULTS)) for block in blocks)
            together = tuple(mixed[rank].get((kind, frozenset(blocks)), blocks)) if mixed[rank] else tuple(blocks)
            result[rank].append(Stay(kind, together, t, len(plan.steps) - 1 if kept else last, kept))
    return result


def _mixed(plan: Plan) -> list[dict[tuple[Kind, frozenset[Block]], tuple[Block, ...]]]:
    """Per rank, by the blocks of other ranks among them: parts of the heads of several ranks, its own too, that a call
    attends together."""
    found: list[dict[tuple[Kind, frozenset[Block]], tuple[Block, ...]]] = [{} for _ in range(plan.n)]
    for step in plan.steps:
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                if attend.heads.parts == 1:
                    continue
                inputs = plan.inputs(attend, rank)
                for blocks in (inputs[: len(attend.queries)], inputs[len(attend.queries) :]):
                    away = frozenset(block for block in blocks if block.home != rank)
                    if 0 < len(away) < len(blocks):
                        found[rank].setdefault((blocks[0].kind, away), blocks)
    return found


def assign(rank_stays: Sequence[Stay]) -> tuple[list[int], list[int]]:
    """Give every stay of a rank one of as few slots as their times allow.

    Returns:
        by stay, its slot, and until which step that slot was busy before it (-1: never).
    """
    alike: list[tuple[Kind, int, bool]] = []
    busy: list[int] = []
    slot_of, busy_until = [], []
    for stay in rank_stays:
        kind = (stay.kind, stay.heads.parts, stay.kept)
        free = [i for i, other in enumerate(alike) if other == kind and busy[i] < stay.first]
        if free:
            slot = min(free, key=lambda i: busy[i])  # the one free for longest: least to wait for
        else:
            slot = len(alike)
            alike.append(kind)
            busy.append(-1)
        slot_of.append(slot)
        busy_until.append(busy[slot])
        busy[slot] = stay.last
    return slot_of, busy_until


_Uses = dict[tuple[Kind, int], list[tuple[int, int, Block]]]
_start = itemgetter(0)


def _uses(plan: Plan) -> list[_Uses]:
    """Per rank, by kind and home: (start, step, block) of what it attends or sends on, in the order of starts, since
    batches of many sequences have many blocks."""
    uses: list[_Uses] = [{} for _ in range(plan.n)]
    for t, step in enumerate(plan.steps):
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for block in plan.inputs(attend, rank):
                    uses[rank].setdefault((block.kind, block.home), []).append((block.start, t, block))
        for move in step.moves:
            uses[move.source].setdefault((move.block.kind, move.block.home), []).append(
                (move.block.start, t, move.block)
            )
    for of_rank in uses:
        for each in of_rank.values():
            each.sort(key=_start)
    return uses


def _last_use(block: Block, uses: _Uses, least: int) -> int:
    found = uses.get((block.kind, block.home), [])
    within = takewhile(lambda use: use[0] < block.stop, found[bisect_left(found, block.start, key=_start) :])
    return max((t for _, t, used in within if block.contains(used)), default=least)


def buffer_need(plan: Plan) -> dict[Kind, int]:
    """Most tokens per kind that any rank's buffers hold at once; what `Plan.buffers` has to state. Without what is
    kept, which has memory of its own.

    Part of the heads counts as that part of a token, rounded up at the end.
    """
    need: dict[Kind, int] = {}
    for rank_stays in stays(plan):
        held: dict[tuple[Kind, int], Fraction | int] = {}
        for stay in rank_stays:
            if stay.kept:
                continue
            for t in range(stay.first, min(stay.last, len(plan.steps)) + 1):
                size = stay.tokens if stay.heads.parts == 1 else Fraction(stay.tokens, stay.heads.parts)
                held[stay.kind, t] = held.get((stay.kind, t), 0) + size
        for (kind, _), tokens in held.items():
            need[kind] = max(need.get(kind, 0), ceil(tokens))
    return need
