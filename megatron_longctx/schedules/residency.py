"""When blocks of other ranks sit in a rank's buffers: one pure computation for `verify`, the executor and prices."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from .plan import RESULTS, Block, Heads, Kind, Plan


@dataclass(frozen=True)
class Stay:
    """Blocks of one kind and the same heads that reach a rank in one step share a buffer, in the step's order of moves.

    The buffer is taken from the start of step `first` (the receive is posted) to the end of step `last`.
    """

    kind: Kind
    blocks: tuple[Block, ...]
    first: int
    last: int

    @property
    def tokens(self) -> int:
        return sum(block.tokens for block in self.blocks)

    @property
    def heads(self) -> Heads:
        return self.blocks[0].heads


def stays(plan: Plan) -> list[list[Stay]]:
    """The stays of every rank, in order of arrival. Results stay until the step after they arrive, when they merge.

    A rank that only passes results on keeps them until it has.
    """
    uses = _uses(plan)
    result: list[list[Stay]] = [[] for _ in range(plan.n)]
    for t, step in enumerate(plan.steps):
        arriving: dict[tuple[int, Kind, Heads], list[Block]] = {}
        for move in step.moves:
            arriving.setdefault((move.destination, move.block.kind, move.block.heads), []).append(move.block)
        for (rank, kind, _), blocks in arriving.items():
            last = max(_last_use(block, uses[rank], t + (kind in RESULTS)) for block in blocks)
            result[rank].append(Stay(kind, tuple(blocks), t, last))
    return result


_Uses = dict[tuple[Kind, int], list[tuple[Block, int]]]


def _uses(plan: Plan) -> list[_Uses]:
    """Per rank, by kind and home: the blocks it attends or sends on, with the step."""
    uses: list[_Uses] = [{} for _ in range(plan.n)]
    for t, step in enumerate(plan.steps):
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for block in attend.inputs(plan.backward):
                    uses[rank].setdefault((block.kind, block.home), []).append((block, t))
        for move in step.moves:
            uses[move.source].setdefault((move.block.kind, move.block.home), []).append((move.block, t))
    return uses


def _last_use(block: Block, uses: _Uses, least: int) -> int:
    return max((t for used, t in uses.get((block.kind, block.home), ()) if block.contains(used)), default=least)


def buffer_need(plan: Plan) -> dict[Kind, int]:
    """Most tokens per kind that any rank holds at once; what `Plan.buffers` has to state.

    Part of the heads counts as that part of a token, rounded up at the end.
    """
    need: dict[Kind, int] = {}
    for rank_stays in stays(plan):
        held: dict[tuple[Kind, int], Fraction | int] = {}
        for stay in rank_stays:
            for t in range(stay.first, min(stay.last, len(plan.steps)) + 1):
                size = stay.tokens if stay.heads.parts == 1 else Fraction(stay.tokens, stay.heads.parts)
                held[stay.kind, t] = held.get((stay.kind, t), 0) + size
        for (kind, _), tokens in held.items():
            need[kind] = max(need.get(kind, 0), ceil(tokens))
    return need
