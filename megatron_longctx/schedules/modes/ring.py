"""Ring attention: key/value blocks travel around the ranks, queries stay.

On the contiguous layout this is Ring Attention (half the causal work idles), on zigzag the balanced zigzag ring, on
striped Striped Attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import Attend, Block, Move, Plan, Step
from ..visibility import Visibility, needed_on
from .mode import Mode


def ring(seen: Visibility, name: str, keys: Sequence[Sequence[Block]] | None = None) -> Plan:
    """Step t: rank r attends to the keys of rank r-t and passes on to r+1 what somebody there still needs of them.

    keys: by rank, its keys in the order in which they are attended; None for the order of its slots.
    """
    n = seen.queries.n
    held = seen.all_keys() if keys is None else keys
    travelling = [needed_on(seen, home, [(home + t) % n for t in range(1, n)], held[home]) for home in range(n)]
    steps = []
    for t in range(n):
        moves: list[Move] = []
        attends: list[tuple[Attend, ...]] = []
        for r in range(n):
            home = (r - t) % n
            found = seen.attend(r, held[home])
            attends.append(() if found is None else (found,))
            if t + 1 < n:
                moves += [Move(block, r, (r + 1) % n) for block in travelling[home][t]]
        steps.append(Step(tuple(moves), tuple(attends)))
    return Plan(name, seen.mask, seen.queries, seen.keys, tuple(steps))


@dataclass(frozen=True)
class Ring(Mode):
    name = "ring"
    about = "Ring Attention, contiguous tokens"
    layout = "contiguous"

    def plan(self, seen: Visibility) -> Plan:
        return ring(seen, self.name)


@dataclass(frozen=True)
class Zigzag(Ring):
    name = "zigzag"
    about = "balanced ring"
    layout = "zigzag"


@dataclass(frozen=True)
class Striped(Ring):
    name = "striped"
    about = "Striped Attention"
    layout = packed_layout = "striped"
