"""Leaving out messages that nobody needs."""

from __future__ import annotations

from dataclasses import replace

from .plan import RESULTS, Block, Kind, Plan, Step


def prune(plan: Plan) -> Plan:
    """The plan without moves of inputs that their receiver neither attends nor has to pass on.

    A mode may then pass blocks round without asking who sees them: under a causal mask many are of no use to the last
    ranks on their way.
    """
    needed: dict[tuple[int, Kind, int], list[Block]] = {}  # by rank, kind and home: what later steps use there
    steps: list[Step] = []
    for step in reversed(plan.steps):
        kept = tuple(
            move
            for move in step.moves
            if move.block.kind in RESULTS
            or any(
                move.block.start < used.stop and used.start < move.block.stop
                for used in needed.get((move.destination, move.block.kind, move.block.home), ())
            )
        )
        steps.append(step._replace(moves=kept))
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for block in plan.inputs(attend, rank):
                    needed.setdefault((rank, block.kind, block.home), []).append(block)
        for move in kept:
            needed.setdefault((move.source, move.block.kind, move.block.home), []).append(move.block)
    return replace(plan, steps=tuple(reversed(steps)))
