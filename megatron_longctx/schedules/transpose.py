"""The backward plan of any forward plan."""

from __future__ import annotations

from .plan import Attend, Block, Kind, Move, Plan, Step

_INPUTS = {Kind.KV: Kind.KV, Kind.Q: Kind.Q_GRAD}


def transpose(plan: Plan) -> Plan:
    """Same pairs on the same ranks; inputs travel as in forward, gradients go straight home.

    A rank that attended another rank's keys sends its partial dK, dV to their home in the next step, and the home adds
    up what arrives in fp32. Sent in the kernel's own output precision, this loses nothing and moves half the bytes of
    an accumulator that travels the ring in fp32. Likewise for queries that a helper attended.

    Raises:
        ValueError: `plan` is a backward plan already.
    """
    if plan.backward:
        raise ValueError(f"plan {plan.name} is a backward plan: expected a forward plan. Transpose the forward plan.")
    steps: list[Step] = []
    results: tuple[Move, ...] = ()
    for step in plan.steps:
        inputs = tuple(
            move._replace(block=move.block._replace(kind=_INPUTS[move.block.kind]))
            for move in step.moves
            if move.block.kind in _INPUTS
        )
        steps.append(Step(inputs + results, step.attends))
        results = tuple(
            Move(block, rank, block.home)
            for rank, attends in enumerate(step.attends)
            for attend in attends
            for block in gradients_away(attend, rank)
        )
    if results:
        steps.append(Step(results, ((),) * plan.n))
    return Plan(plan.name, plan.layout, plan.causal, tuple(steps), backward=True)


def gradients_away(attend: Attend, rank: int) -> list[Block]:
    """The partial gradients that `rank` computes in `attend` for other ranks, in the order they are sent."""
    away = [key._replace(kind=Kind.DKV, origin=rank) for key in attend.keys if key.home != rank]
    return away + [query._replace(kind=Kind.DQ, origin=rank) for query in attend.queries if query.home != rank]
