"""Queries go directly to every rank and partial results back: two exchanges for any number of ranks."""

from collections.abc import Sequence

from ..plan import Block, Kind, Move, Plan, Step, trim
from ..visibility import Visibility
from .pass_q import return_outputs


def one_hop(visible: Visibility, keys: Sequence[Sequence[Block]]) -> Plan:
    """Queries travel to all ranks while each attends with its own; each attends for the others; then results return."""
    n = visible.queries.n
    own = tuple(visible.attend(r, keys[r]) for r in range(n))
    others = tuple(tuple(c for t in range(1, n) for c in visible.attend((r - t) % n, keys[r])) for r in range(n))
    moves = [
        Move(Block(Kind.Q, home, 0, visible.queries.num_tokens(home)), home, (home + t) % n)
        for t in range(1, n)
        for home in range(n)
        if visible.queries.num_tokens(home)
    ]
    steps = [Step(tuple(moves), own)] + ([Step((), others)] if n > 1 else [])
    steps += return_outputs(steps, n)
    return trim(Plan("one_hop", visible.mask, visible.queries, visible.keys, tuple(steps)))
