"""TASP: several concurrent rings over edge-disjoint Hamiltonian cycles of the topology (paper, sections 3 and 4).

Every rank's keys are cut into one piece per ring. All rings move in each step, so a full mesh of n ranks uses all
n(n-1) links where one ring uses n. The zigzag layout balances causal work as it does for one ring: piece i of a rank is
the i-th part of its front half and, mirrored, of its back half.

The mode depends on how ranks are linked, so it is here and not in `core`. Importing this module registers it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ..core.plans.modes.mode import Mode, ModeOptions
from ..core.plans.plan import Block, Kind, Move, Plan, Step
from ..core.plans.visibility import Visibility
from .cluster import Cluster
from .hamiltonian import hamiltonian_cycles
from .rings import Rings, choose_rings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tasp(Mode):
    """rings: each a permutation of all ranks. A single rank needs none."""

    rings: Rings = field(default=(), repr=False)

    name = "tasp"
    layout = "zigzag"

    @classmethod
    def from_options(cls, options: ModeOptions, n: int) -> Mode:
        if options.cluster is None:
            return cls(hamiltonian_cycles(n))
        assert isinstance(options.cluster, Cluster)
        chosen, why = choose_rings(options.cluster)
        logger.info("tasp uses %s", why)
        return cls(chosen.rings)

    def num_messages(self, n: int, length: int) -> int:
        return n * n * len(self.rings)

    def plan(self, visible: Visibility) -> Plan:
        """In step t, rank r holds in every ring the piece of the rank t places before it in that ring.

        Raises:
            ValueError: a ring that does not pass every rank once.
        """
        n, rings = visible.queries.n, self.rings
        if any(sorted(ring) != list(range(n)) for ring in rings) or (n > 1 and not rings):
            raise ValueError(f"rings={rings}: expected at least one ring that passes each of the {n} ranks once.")
        place = [{rank: i for i, rank in enumerate(ring)} for ring in rings]
        hops: dict[tuple[int, int], list[list[Block]]] = {}  # keyed by ring and home rank
        for i, ring in enumerate(rings):
            for at, home in enumerate(ring):
                pieces = _pieces(visible, home, i, len(rings))
                hops[i, home] = visible.needed_per_hop(home, [*ring[at + 1 :], *ring[:at]], pieces)
        steps: list[Step] = []
        held = visible.all_keys
        for t in range(n):
            arriving: list[list[tuple[Block, int]]] = [[] for _ in range(n)]
            for i, ring in enumerate(rings) if t + 1 < n else ():
                for r in range(n):
                    home = ring[(place[i][r] - t) % n]
                    to = ring[(place[i][r] + 1) % n]
                    arriving[to] += [(piece, r) for piece in hops[i, home][t]]
            for r in range(n):  # pieces that the same queries see arrive side by side
                arriving[r].sort(key=lambda item: (visible.first_query(r, item[0]), item[0]))
            moves = tuple(Move(piece, source, r) for r in range(n) for piece, source in arriving[r])
            steps.append(Step(moves, tuple(visible.attend(r, held[r]) for r in range(n))))
            held = [[piece for piece, _ in arriving[r]] for r in range(n)]
        return Plan(self.name, visible.mask, visible.queries, visible.keys, tuple(steps))


def _pieces(visible: Visibility, home: int, ring: int, rings: int) -> list[Block]:
    """Return piece `ring` of each of the home's spans, in alternate spans counted from the back (mirrored)."""
    blocks = []
    for number, (start, span) in enumerate(visible.keys.slot_spans(home)):
        i = ring if number % 2 == 0 else rings - 1 - ring
        low, high = start + len(span) * i // rings, start + len(span) * (i + 1) // rings
        if low < high:
            blocks.append(Block(Kind.KV, home, low, high))
    return blocks
