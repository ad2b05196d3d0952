"""Queries travel around a ring (Alg. 3 of "Context Parallelism for Scalable Million-Token Inference")."""

from collections.abc import Sequence

from ..plan import Block, Kind, Move, Plan, Step, return_moves, trim
from ..visibility import Visibility


def pass_q(visible: Visibility, keys: Sequence[Sequence[Block]]) -> Plan:
    """In step t, rank r attends with the queries of rank r-t and passes them on to r+1; at the end results go home."""
    n = visible.queries.n
    steps = []
    for t in range(n):
        moves = [
            Move(Block(Kind.Q, home, 0, visible.queries.num_tokens(home)), r, (r + 1) % n)
            for r in range(n)
            if visible.queries.num_tokens(home := (r - t) % n) and t < n - 1
        ]
        steps.append(Step(tuple(moves), tuple(visible.attend((r - t) % n, keys[r]) for r in range(n))))
    steps += return_outputs(steps, n)
    return trim(Plan("pass_q", visible.mask, visible.queries, visible.keys, tuple(steps)))


def return_outputs(steps: Sequence[Step], n: int) -> list[Step]:
    """Return one step in which every rank sends home what it has computed for others, or no step.

    Moves are ordered by distance from home, so the order of merging does not depend on where a sequence begins.
    """
    moves = sorted(return_moves(steps), key=lambda move: ((move.source - move.destination) % n, move.source))
    return [Step(tuple(moves), ((),) * n)] if moves else []
