"""TASP: several rings at once, over edge-disjoint Hamiltonian cycles of the topology (paper, sections 3 and 4).

Every rank's keys are cut into one piece a ring; in each step all rings move, so that a full mesh of n ranks uses all
n(n-1) links where one ring uses n. The zigzag layout balances causal work as it does for one ring: piece i of a rank is
the i-th part of its front half and, mirrored, of its back half.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ...topology import choose, hamiltonian_cycles
from ..plan import Attend, Block, Kind, Move, Plan, Step
from ..visibility import Visibility, needed_on
from .mode import Mode, ModeOptions, check_messages

logger = logging.getLogger(__name__)

Rings = tuple[tuple[int, ...], ...]
"""Ranks of each ring in the order in which blocks pass them."""

_MANY_LINKS = 64  # rings among more ranks may take minutes to find


@dataclass(frozen=True)
class Tasp(Mode):
    """rings: each a permutation of all ranks. One rank alone needs none."""

    rings: Rings = field(default=(), repr=False)

    name = "tasp"
    about = "rings over all edge-disjoint Hamiltonian cycles of the topology"
    layout = "zigzag"

    @classmethod
    def of(cls, options: ModeOptions, n: int) -> Mode:
        links = n if options.cluster is None else min(n, options.cluster.ranks_per_node)
        if links > _MANY_LINKS:
            check_messages(cls.name, n, n * n * links)
        if options.cluster is None:
            return cls(hamiltonian_cycles(n))
        found, why = choose(options.cluster)
        logger.info("tasp takes %s", why)
        return cls(found.rings)

    def num_messages(self, n: int, length: int) -> int:
        return n * n * len(self.rings)

    def plan(self, seen: Visibility) -> Plan:
        """Step t: rank r holds, of every ring, the piece of the rank t places before it there.

        Raises:
            ValueError: a ring that does not pass every rank once.
        """
        n, rings = seen.queries.n, self.rings
        if any(sorted(ring) != list(range(n)) for ring in rings) or (n > 1 and not rings):
            raise ValueError(f"rings={rings}: expected at least one ring that passes each of the {n} ranks once.")
        place = [{rank: i for i, rank in enumerate(ring)} for ring in rings]
        travelling = [[_travel(seen, ring, place[i], home, i, len(rings)) for home in range(n)]
                      for i, ring in enumerate(rings)]  # fmt: skip
        steps: list[Step] = []
        held = seen.all_keys()
        for t in range(n):
            arriving: list[list[tuple[Block, int]]] = [[] for _ in range(n)]
            for i, ring in enumerate(rings) if t + 1 < n else ():
                for r in range(n):
                    home = ring[(place[i][r] - t) % n]
                    to = ring[(place[i][r] + 1) % n]
                    arriving[to] += [(piece, r) for piece in travelling[i][home][t]]
            for r in range(n):  # pieces that the same queries see arrive side by side
                arriving[r].sort(key=lambda item: (seen.first_query(r, item[0]), item[0]))
            moves = tuple(Move(piece, source, r) for r in range(n) for piece, source in arriving[r])
            attends: list[tuple[Attend, ...]] = []
            for r in range(n):
                found = seen.attend(r, held[r])
                attends.append(() if found is None else (found,))
            steps.append(Step(moves, tuple(attends)))
            held = [[piece for piece, _ in arriving[r]] for r in range(n)]
        return Plan(self.name, seen.mask, seen.queries, seen.keys, tuple(steps))


def _travel(
    seen: Visibility, ring: tuple[int, ...], place: dict[int, int], home: int, number: int, count: int
) -> list[list[Block]]:
    """What leaves on each hop of a ring of the home's pieces: as long as somebody further along sees any of it."""
    n = len(ring)
    readers = [ring[(place[home] + t) % n] for t in range(1, n)]
    return needed_on(seen, home, readers, _pieces(seen, home, number, count))


def _pieces(seen: Visibility, home: int, ring: int, rings: int) -> list[Block]:
    """Piece `ring` of each of the home's spans: ascending in the first, descending in the second (mirrored)."""
    blocks = []
    for number, (start, span) in enumerate(seen.keys.slot_spans(home)):
        i = ring if number % 2 == 0 else rings - 1 - ring
        low, high = start + len(span) * i // rings, start + len(span) * (i + 1) // rings
        if low < high:
            blocks.append(Block(Kind.KV, home, low, high))
    return blocks
