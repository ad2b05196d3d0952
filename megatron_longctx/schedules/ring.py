"""Ring attention: key/value blocks travel around the ranks, queries stay.

On the contiguous layout this is Ring Attention (half the causal work idles), on zigzag the balanced zigzag ring, on
striped Striped Attention.
"""

from __future__ import annotations

from ..layout import Layout
from .calls import attends_on
from .plan import Block, Kind, Move, Plan, Step


def ring(layout: Layout, causal: bool, name: str = "ring") -> Plan:
    """Step t: rank r attends to the block of rank r-t and passes it on to r+1, if anybody there still needs it."""
    n = layout.n
    steps = []
    attends = [tuple(attends_on(layout, r, (r - t) % n, causal) for r in range(n)) for t in range(n)]
    last_use = [max((t for t in range(n) if attends[t][(s + t) % n]), default=0) for s in range(n)]
    for t in range(n):
        moves = tuple(
            Move(Block(Kind.KV, s, 0, layout.num_tokens(s)), r, (r + 1) % n)
            for r in range(n)
            if t < last_use[s := (r - t) % n] and layout.num_tokens(s)
        )
        steps.append(Step(moves, attends[t]))
    return Plan(name, layout, causal, tuple(steps))
