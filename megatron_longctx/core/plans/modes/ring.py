"""Ring attention: key/value blocks travel around the ranks, queries stay.

On the contiguous layout this is Ring Attention, where half of the causal work is idle time. On zigzag it is the
balanced zigzag ring, on striped it is Striped Attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import Block, Move, Plan, Step
from ..visibility import Visibility
from .mode import Mode


def ring(visible: Visibility, name: str, keys: Sequence[Sequence[Block]] | None = None) -> Plan:
    """Return the plan in which, in step t, rank r attends to the keys of rank r-t and passes them on to rank r+1.

    Only keys that r+1 or a later rank needs are passed on.

    keys: indexed by rank, its keys in the order in which they are attended to; None for the order of its slots.
    """
    n = visible.queries.n
    held = visible.all_keys if keys is None else keys
    hops = [visible.needed_per_hop(home, [(home + t) % n for t in range(1, n)], held[home]) for home in range(n)]
    steps = []
    for t in range(n):
        homes = [(r - t) % n for r in range(n)]
        attends = tuple(visible.attend(r, held[home]) for r, home in enumerate(homes))
        passed_on = ((block, r) for r, home in enumerate(homes) for block in hops[home][t]) if t + 1 < n else ()
        steps.append(Step(tuple(Move(block, r, (r + 1) % n) for block, r in passed_on), attends))
    return Plan(name, visible.mask, visible.queries, visible.keys, tuple(steps))


@dataclass(frozen=True)
class Ring(Mode):
    name = "ring"
    layout = "contiguous"

    def plan(self, visible: Visibility) -> Plan:
        return ring(visible, self.name)


@dataclass(frozen=True)
class Zigzag(Ring):
    name = "zigzag"
    layout = "zigzag"


@dataclass(frozen=True)
class Striped(Ring):
    name = "striped"
    layout = packed_layout = "striped"
