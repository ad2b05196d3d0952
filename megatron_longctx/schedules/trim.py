"""Leaving out of messages what nobody needs: a window costs the bytes of a window, whatever the mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .mask import runs
from .plan import RESULTS, Block, Kind, Move, Plan, Step

_Needs = dict[tuple[int, Kind, int], list[Block]]
"""By rank, kind and home: what later steps use there."""


def trim(plan: Plan) -> Plan:
    """The plan whose moves of inputs carry just the rows that their receiver attends or passes on.

    A mode may then pass blocks round without asking who sees them: most masks leave little to see on the last ranks of
    the way.
    """
    needs: _Needs = {}
    steps: list[Step] = []
    for step in reversed(plan.steps):
        kept = tuple(piece for move in step.moves for piece in _needed_of(move, needs))
        steps.append(step._replace(moves=kept))
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for blocks in plan.inputs(attend, rank):
                    for block in blocks:
                        needs.setdefault((rank, block.kind, block.home), []).append(block)
        for block, source, _ in kept:
            needs.setdefault((source, block.kind, block.home), []).append(block)
    return replace(plan, steps=tuple(reversed(steps)))


def _needed_of(move: Move, needs: _Needs) -> Iterator[Move]:
    block = move.block
    used = needs.get((move.destination, block.kind, block.home), ())
    if block.kind in RESULTS or block in used:
        yield move
        return
    spans = [(max(block.start, each.start), min(block.stop, each.stop)) for each in used if block.overlaps(each)]
    for start, stop in runs(spans):
        whole = (start, stop) == (block.start, block.stop)
        yield move if whole else move._replace(block=block._replace(start=start, stop=stop))
