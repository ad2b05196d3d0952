"""Double ring (LoongTrain): blocks circle inside a node over fast links, and from node to node over slow ones.

While the ranks of a node pass their node's blocks around, each block for the next round crosses from the neighbouring
node, one piece a step: the slow links are busy all the time and never block the fast ones.
"""

from __future__ import annotations

from ..layout import Layout
from .calls import attends_on, attends_over
from .plan import Attend, Block, Kind, Move, Plan, Step
from .prune import prune


def double_ring(layout: Layout, causal: bool, inner: int) -> Plan:
    """Round a, step c: rank (o, i) holds the block of rank (o-a, i-c).

    Args:
        inner: ranks of a node; neighbours in rank order.

    Raises:
        ValueError: `inner` does not divide the ranks.
    """
    n = layout.n
    if inner < 1 or n % inner:
        legal = ", ".join(str(k) for k in range(1, n + 1) if n % k == 0)
        raise ValueError(f"inner_size={inner}: expected a divisor of the {n} ranks. Choose one of {legal}.")
    outer = n // inner
    steps = []
    for t in range(n):
        a, c = divmod(t, inner)
        moves: list[Move] = []
        attends: list[tuple[Attend, ...]] = []
        for r in range(n):
            home = _home(r, a, c, inner, outer)
            pieces = _pieces(layout, home, inner)
            attends.append(attends_on(layout, r, r, causal) if home == r else attends_over(layout, r, pieces, causal))
            if c + 1 < inner:
                to = r // inner * inner + (r + 1) % inner
                moves += [Move(piece, r, to) for piece in pieces]
            if a + 1 < outer:  # piece c of the block that this rank had when the round began
                first = _pieces(layout, _home(r, a, 0, inner, outer), inner, keep_empty=True)[c]
                if first.tokens:
                    moves.append(Move(first, r, (r + inner) % n))
        steps.append(Step(tuple(moves), tuple(attends)))
    return prune(Plan("double_ring", layout, causal, tuple(steps)))


def _home(rank: int, a: int, c: int, inner: int, outer: int) -> int:
    return (rank // inner - a) % outer * inner + (rank - c) % inner


def _pieces(layout: Layout, home: int, count: int, keep_empty: bool = False) -> list[Block]:
    tokens = layout.num_tokens(home)
    blocks = [Block(Kind.KV, home, tokens * i // count, tokens * (i + 1) // count) for i in range(count)]
    return [block for block in blocks if block.tokens or keep_empty]
