"""TASP: several rings at once, over edge-disjoint Hamiltonian cycles of the topology (paper, sections 3 and 4).

Every rank's keys are cut into one piece a ring; in each step all rings move, so that a full mesh of n ranks uses all
n(n-1) links where one ring uses n. The zigzag layout balances causal work as it does for one ring: piece i of a rank is
the i-th part of its front half and, mirrored, of its back half.
"""

from __future__ import annotations

from ..layout import Layout
from .calls import attends_over
from .plan import Attend, Block, Kind, Move, Plan, Step

Rings = tuple[tuple[int, ...], ...]
"""Ranks of each ring in the order in which blocks pass them."""


def tasp(layout: Layout, causal: bool, rings: Rings) -> Plan:
    """Step t: rank r holds, of every ring, the piece of the rank t places before it there.

    A piece is passed on only as long as somebody further along its ring sees any of it.

    Args:
        rings: each a permutation of all ranks. One rank alone needs none.

    Raises:
        ValueError: a ring that does not pass every rank once.
    """
    n = layout.n
    if any(sorted(ring) != list(range(n)) for ring in rings) or (n > 1 and not rings):
        raise ValueError(f"rings={rings}: expected at least one ring that passes each of the {n} ranks once.")
    place = [{rank: i for i, rank in enumerate(ring)} for ring in rings]
    pieces = [[_pieces(layout, home, i, len(rings)) for home in range(n)] for i in range(len(rings))]
    last = [[[_last_use(layout, ring, place[i], home, p, causal) for p in pieces[i][home]] for home in range(n)]
            for i, ring in enumerate(rings)]  # fmt: skip
    steps = []
    for t in range(n):
        arriving: list[list[tuple[Block, int]]] = [[] for _ in range(n)]
        present: list[list[Block]] = [[] for _ in range(n)]
        for i, ring in enumerate(rings):
            for r in range(n):
                home = ring[(place[i][r] - t) % n]
                present[r] += pieces[i][home] if t else []
                arriving[ring[(place[i][r] + 1) % n]] += [
                    (piece, r) for piece, use in zip(pieces[i][home], last[i][home], strict=True) if t < use
                ]
        moves = tuple(
            Move(piece, source, r)
            for r in range(n)
            for piece, source in sorted(arriving[r], key=lambda item: _use(layout, r, item[0], causal))
        )
        attends: list[tuple[Attend, ...]] = []
        for r in range(n):
            own = [Block(Kind.KV, r, 0, layout.num_tokens(r))] if layout.num_tokens(r) else []
            held = sorted(present[r], key=lambda piece: _use(layout, r, piece, causal)) if t else own
            attends.append(attends_over(layout, r, held, causal))
        steps.append(Step(moves, tuple(attends)))
    return Plan("tasp", layout, causal, tuple(steps))


def _last_use(
    layout: Layout, ring: tuple[int, ...], place: dict[int, int], home: int, piece: Block, causal: bool
) -> int:
    """How many hops from home the last rank of the ring is that sees any of the piece."""
    n = len(ring)
    hops = range(n - 1, 0, -1)
    return next((t for t in hops if attends_over(layout, ring[(place[home] + t) % n], [piece], causal)), 0)


def _pieces(layout: Layout, home: int, ring: int, rings: int) -> list[Block]:
    """Piece `ring` of each of the home's spans: ascending in the first, descending in the second (mirrored)."""
    blocks, start = [], 0
    for number, span in enumerate(layout.spans[home]):
        i = ring if number % 2 == 0 else rings - 1 - ring
        low, high = start + len(span) * i // rings, start + len(span) * (i + 1) // rings
        blocks.append(Block(Kind.KV, home, low, high))
        start += len(span)
    return [block for block in blocks if block.tokens]


def _use(layout: Layout, rank: int, piece: Block, causal: bool) -> tuple[int, Block]:
    """Sorts pieces that the same queries see next to each other, so that they arrive side by side."""
    calls = attends_over(layout, rank, [piece], causal)
    return (calls[0].queries[0].start if calls else layout.num_tokens(rank)), piece
