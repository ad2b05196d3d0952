"""Double ring (LoongTrain): blocks circle inside a node over fast links, and from node to node over slow ones.

While the ranks of a node pass their node's blocks around, each block for the next round crosses from the neighbouring
node, one piece a step: the slow links are busy all the time and never block the fast ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import refuse
from ..plan import Attend, Block, Kind, Move, Plan, Step
from ..trim import trim
from ..visibility import Visibility
from .mode import Choices, Mode, ModeOptions


@dataclass(frozen=True)
class DoubleRing(Mode):
    """inner_size: ranks of a node, neighbours in rank order."""

    inner_size: int = 1

    name = "double_ring"
    about = "a ring inside each node, a ring of nodes around it"
    layout = "zigzag"

    @classmethod
    def of(cls, options: ModeOptions, n: int) -> Mode:
        return cls(options.inner(n))

    @classmethod
    def candidates(cls, choices: Choices) -> Iterator[Mode]:
        n = choices.n
        sizes = {choices.cluster.ranks_per_node, choices.options.inner(n)} - {n}
        yield from (cls(k) for k in sorted(sizes) if n % k == 0)

    def num_messages(self, n: int, length: int) -> int:
        return n * n * self.inner_size

    def plan(self, seen: Visibility) -> Plan:
        """Round a, step c: rank (o, i) holds the block of rank (o-a, i-c).

        Raises:
            ValueError: `inner_size` does not divide the ranks.
        """
        n, inner = seen.queries.n, self.inner_size
        check_divides(inner, n)
        outer = n // inner
        steps = []
        for t in range(n):
            a, c = divmod(t, inner)
            moves: list[Move] = []
            attends: list[tuple[Attend, ...]] = []
            for r in range(n):
                home = _home(r, a, c, inner, outer)
                pieces = _pieces(seen, home, inner)
                found = seen.attend(r, pieces if home != r else _pieces(seen, r, 1))  # own keys lie as one
                attends.append(() if found is None else (found,))
                if c + 1 < inner:
                    to = r // inner * inner + (r + 1) % inner
                    moves += [Move(piece, r, to) for piece in pieces]
                if a + 1 < outer:  # piece c of the block that this rank had when the round began
                    first = _pieces(seen, _home(r, a, 0, inner, outer), inner, keep_empty=True)[c]
                    if first.tokens:
                        moves.append(Move(first, r, (r + inner) % n))
            steps.append(Step(tuple(moves), tuple(attends)))
        return trim(Plan(self.name, seen.mask, seen.queries, seen.keys, tuple(steps)))


def check_divides(inner: int, n: int) -> None:
    """Refuse groups of ranks that are not all alike.

    Raises:
        ValueError: names the divisors.
    """
    if inner < 1 or n % inner:
        legal = ", ".join(str(k) for k in range(1, n + 1) if n % k == 0)
        raise refuse("parallelism.inner_size", inner, f"a divisor of the {n} ranks", f"Choose one of {legal}.")


def _home(rank: int, a: int, c: int, inner: int, outer: int) -> int:
    return (rank // inner - a) % outer * inner + (rank - c) % inner


def _pieces(seen: Visibility, home: int, count: int, keep_empty: bool = False) -> list[Block]:
    slots = seen.keys.num_tokens(home)
    blocks = [Block(Kind.KV, home, slots * i // count, slots * (i + 1) // count) for i in range(count)]
    return [block for block in blocks if block.tokens or keep_empty]
