"""Double ring (LoongTrain): blocks circulate inside a node over fast links, and from node to node over slow ones.

While the ranks of a node pass their node's blocks around, the blocks for the next round arrive from the neighbouring
node, one piece per step. The slow links are busy all the time and never block the fast ones.
"""

from dataclasses import dataclass

from ..plan import Attend, Block, Kind, Move, Plan, Step, trim
from ..visibility import Visibility
from .mode import NodeMode, check_divides


@dataclass(frozen=True)
class DoubleRing(NodeMode):
    name = "double_ring"

    def num_messages(self, n: int, length: int) -> int:
        return n * n * self.inner_size

    def plan(self, visible: Visibility) -> Plan:
        """In step c of round a, rank (o, i) holds the block of rank (o-a, i-c)."""
        n, inner = visible.queries.n, self.inner_size
        check_divides(inner, n)
        outer = n // inner
        steps = []
        for t in range(n):
            a, c = divmod(t, inner)
            moves: list[Move] = []
            attends: list[tuple[Attend, ...]] = []
            for r in range(n):
                node = (r // inner - a) % outer * inner  # the first rank of the node whose blocks circulate here
                home = node + (r - c) % inner
                pieces = [piece for piece in _pieces(visible, home, inner) if piece.tokens]
                attends.append(visible.attend(r, pieces) if home != r else visible.attend(r, visible.all_keys[r]))
                if c + 1 < inner:
                    to = r // inner * inner + (r + 1) % inner
                    moves += [Move(piece, r, to) for piece in pieces]
                if a + 1 < outer:  # piece c of the block that this rank had when the round began
                    first = _pieces(visible, node + r % inner, inner)[c]
                    if first.tokens:
                        moves.append(Move(first, r, (r + inner) % n))
            steps.append(Step(tuple(moves), tuple(attends)))
        return trim(Plan(self.name, visible.mask, visible.queries, visible.keys, tuple(steps)))


def _pieces(visible: Visibility, home: int, count: int) -> list[Block]:
    """Cut the keys of a rank into `count` pieces, which may be empty."""
    slots = visible.keys.num_tokens(home)
    return [Block(Kind.KV, home, slots * i // count, slots * (i + 1) // count) for i in range(count)]
