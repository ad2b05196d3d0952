"""All-gather on two levels: a block crosses to each other node once, to the rank with the same number there.

That rank passes it on inside its node. So all NICs carry the same bytes, the fewest possible. While a part of the
remote keys crosses, the part before it is passed on, and what has arrived before is attended to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..plan import Attend, Block, Kind, Move, Plan, Step, trim
from ..slices import merge_spans
from ..visibility import Visibility
from .mode import ModeOptions, NodeMode, SearchContext, check_divides


@dataclass(frozen=True)
class NodeGather(NodeMode):
    """rounds: the number of steps in which the keys of other nodes cross. If there are fewer than other nodes, several
    cross at a time; if there are more, each in several pieces. None for one node at a time."""

    rounds: int | None = None

    name = "node_gather"

    @classmethod
    def from_options(cls, options: ModeOptions, n: int) -> NodeGather:
        return cls(options.resolve_inner_size(n), options.rounds)

    @classmethod
    def candidates(cls, context: SearchContext) -> Iterator[NodeGather]:
        """Yield few rounds, which have long kernel calls, and more, whose messages overlap better and hold less."""
        inner, others = context.cluster.ranks_per_node, context.cluster.nodes - 1
        if 1 < inner < context.n:
            yield from (cls(inner, k) for k in sorted({1, others, 2 * others, 8 * others}))

    def num_messages(self, n: int, length: int) -> int:
        return n * (self.inner_size + 1) * (n // self.inner_size + 2 * (self.rounds or 0))

    def plan(self, visible: Visibility) -> Plan:
        """In step t, part t of the remote keys crosses and part t - 1 is passed on; what the step before has brought is
        attended to."""
        n, m = visible.queries.n, self.inner_size
        check_divides(m, n)
        parts = _Parts(n // m - 1, self.rounds)
        steps = []
        for t in range(parts.rounds + 2):
            moves: list[Move] = []
            attends: list[tuple[Attend, ...]] = []
            for r in range(n):
                node = range(r - r % m, r - r % m + m)
                for offset, part in parts.crossing(t):
                    home = (r - offset * m) % n
                    moves += [Move(block, home, r) for block in _cut(visible, home, part, node)]
                for offset, part in parts.inside(t):
                    for mate in node:
                        if mate != r:
                            blocks = _cut(visible, (mate - offset * m) % n, part, [r])
                            moves += [Move(block, mate, r) for block in blocks]
                arrived = [((r - offset * m) % n, part) for offset, part in parts.crossing(t - 1)]
                arrived += [
                    ((k - offset * m) % n, part) for offset, part in parts.inside(t - 1) for k in node if k != r
                ]
                keys = [block for home, part in arrived for block in _cut(visible, home, part, [r])]
                attends.append(visible.attend(r, visible.in_query_order(r, keys) if t else visible.all_keys[r]))
            steps.append(Step(tuple(moves), tuple(attends)))
        return trim(Plan(self.name, visible.mask, visible.queries, visible.keys, tuple(steps)))


_Part = tuple[int, int, int]
"""Numerators of where a part of a rank's keys starts and stops, and their denominator."""


class _Parts:
    """Which part of the keys of which node travels in which step. A node is given by its distance from the reader's."""

    def __init__(self, others: int, rounds: int | None) -> None:
        self.others, self.rounds = others, (rounds or others) if others else 0
        self.pieces = max(1, self.rounds // max(1, others))  # of the reader's own node

    def crossing(self, t: int) -> Iterator[tuple[int, _Part]]:
        """Yield what crosses in step t: the t-th of `rounds` equal parts of all other nodes' keys in their order."""
        if 0 <= t < self.rounds:
            for offset in range(1, self.others + 1):
                first = (offset - 1) * self.rounds
                start, stop = max(t * self.others, first), min((t + 1) * self.others, first + self.rounds)
                if start < stop:
                    yield offset, (start - first, stop - first, self.rounds)

    def inside(self, t: int) -> Iterator[tuple[int, _Part]]:
        """Yield what ranks of a node send each other in step t: keys of their own, and those that have crossed."""
        if 0 <= t < self.pieces:
            yield 0, (t, t + 1, self.pieces)
        yield from self.crossing(t - 1)


def _cut(visible: Visibility, home: int, part: _Part, readers: Sequence[int]) -> list[Block]:
    """Return what any of `readers` sees of a part of each span of a rank's keys."""
    seen = [block for reader in readers for block in visible.needed(reader, home)]
    spans = merge_spans((block.start, block.stop) for block in seen)
    first, last, of = part
    found = []
    for start, span in visible.keys.slot_spans(home) if spans else ():
        low, high = start + len(span) * first // of, start + len(span) * last // of
        found += [Block(Kind.KV, home, max(a, low), min(b, high)) for a, b in spans if a < high and low < b]
    return found
