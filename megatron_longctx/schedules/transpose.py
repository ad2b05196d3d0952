"""The backward plan of any forward plan."""

from __future__ import annotations

from dataclasses import replace

from .plan import Block, Heads, Kind, Move, Plan, Step
from .relay import Ready, ways_home
from .trim import trim

_INPUTS = {Kind.KV: (Kind.KV,), Kind.Q: (Kind.Q_GRAD,)}
_INPUTS_AFTER_KEEPING = {Kind.KV: (Kind.KV,), Kind.Q: (Kind.Q_GRAD, Kind.GRAD)}


def transpose(plan: Plan) -> Plan:
    """Same pairs on the same ranks; inputs travel as in forward, gradients go straight home.

    A rank that attended another rank's keys sends its partial dK, dV to their home once it is done with them, and the
    home adds up what arrives in fp32. Sent in the kernel's own output precision, this loses nothing and moves half the
    bytes of an accumulator that travels the ring in fp32. Likewise for queries that a helper attended. Where
    `plan.sum_in_node` says so, one rank of a node adds up what its ranks have for a rank of another node, and sends
    the sum.

    What `plan.kept` says that ranks have kept does not travel again; of kept queries only the gradient of out does.

    Raises:
        ValueError: `plan` is a backward plan already.
    """
    if plan.backward:
        raise ValueError(f"plan {plan.name} is a backward plan: expected a forward plan. Transpose the forward plan.")
    results, kinds = _results(plan), _INPUTS_AFTER_KEEPING if plan.kept else _INPUTS
    steps: list[Step] = []
    for t, step in enumerate(plan.steps):
        inputs = tuple(
            move if kind is move.block.kind else move._replace(block=move.block._replace(kind=kind))
            for move in step.moves
            for kind in kinds.get(move.block.kind, ())
        )
        steps.append(Step(inputs + tuple(results.get(t, ())), step.attends))
    for t in range(len(steps), max(results, default=-1) + 1):
        steps.append(Step(tuple(results.get(t, ())), ((),) * plan.n))
    backward = replace(plan, steps=tuple(steps), backward=True)
    return trim(backward) if plan.kept else backward


def _results(plan: Plan) -> dict[int, list[Move]]:
    """The moves of gradients to their homes, by step: in the one after the last call that adds to them.

    What overlaps travels as one, so that nothing is sent twice. These are the backward plan's `Plan.results_away`, but
    without a block for each call: many ranks have millions of these.
    """
    away: dict[tuple[int, Kind, int, Heads], list[tuple[int, int, int]]] = {}
    for t, step in enumerate(plan.steps):
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for kind, blocks in ((Kind.DKV, attend.keys), (Kind.DQ, attend.queries)):
                    for _, home, start, stop, _, heads in blocks:
                        if home != rank:
                            away.setdefault((rank, kind, home, heads), []).append((start, stop, t))
    ready: list[Ready] = []
    for (rank, kind, home, heads), computed in away.items():
        computed.sort()
        first, open_stop, last = computed[0]
        for start, stop, t in computed:
            if start >= open_stop:
                ready.append(Ready(Block(kind, home, first, open_stop, rank, heads), last + 1))
                first, open_stop, last = start, stop, t
            else:
                open_stop, last = max(open_stop, stop), max(last, t)
        ready.append(Ready(Block(kind, home, first, open_stop, rank, heads), last + 1))
    moves: dict[int, list[Move]] = {}
    for t, move in ways_home(ready, plan.sum_in_node):
        moves.setdefault(t, []).append(move)
    return moves
