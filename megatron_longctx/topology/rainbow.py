"""A Hamiltonian path that takes one arc from each of the given Hamiltonian cycles, found by a repeatable search.

With n-1 cycles that decompose K*_n, such a path has n-1 arcs, one of each colour (= number of the cycle an arc is in).
`hamiltonian` needs it to go from K*_n to K*_(n+1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

_STUCK = 0.2  # share of steps at which the search leaves the best neighbour for a random rotation


def rainbow_path(cycles: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """A Hamiltonian path with exactly one arc in each of the n-1 `cycles` of K*_n, which must decompose it.

    A local search: starting from any path, exchange two neighbouring pieces so that an arc of a missing colour comes in
    and the fewest colours are missing afterwards, with an occasional random rotation against going round in circles.
    About n²/4 exchanges bring a given colour in, and if colours were random about one in n²/6 would mend a path that
    lacks one colour only, so few steps are needed. Repeatable: of the generator only `random()` is used, whose sequence
    Python guarantees for a seed.

    Does not return where there is no such path (n = 3 and 5).
    """
    search = _Search(cycles)
    while search.missing:
        search.step()
    return tuple(search.path)


class _Search:
    def __init__(self, cycles: Sequence[Sequence[int]]) -> None:
        n = len(cycles[0])
        self.n = n
        self.after = [[0] * n for _ in cycles]  # after[c][v]: the vertex that follows v in cycle c
        self.colour = [[-1] * n for _ in range(n)]
        for c, cycle in enumerate(cycles):
            for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
                self.after[c][a] = b
                self.colour[a][b] = c
        self.random = Random(n).random
        self._set(list(range(n)))

    def _set(self, path: list[int]) -> None:
        self.path = path
        self.arcs = [self.colour[a][b] for a, b in pairwise(path)]
        self.count = [0] * (self.n - 1)
        for c in self.arcs:
            self.count[c] += 1
        self.missing = [c for c, count in enumerate(self.count) if not count]

    def step(self) -> None:
        path = self.path
        missing, cuts = self._best_exchange(self.missing[int(self.random() * len(self.missing))])
        if missing and (cuts is None or self.random() < _STUCK):
            k = 1 + int(self.random() * (self.n - 1))
            self._set(path[k:] + path[:k])
        elif cuts is not None:
            i, j, k = cuts
            self._set(path[:i] + path[j:k] + path[i:j] + path[k:])

    def _best_exchange(self, wanted: int) -> tuple[int, tuple[int, int, int] | None]:
        """The exchange of path[i:j] with path[j:k] that makes path[i-1] -> path[j] an arc of colour `wanted` and leaves
        the fewest colours missing (any of these, if several), with that number."""
        path, arcs, colour, n = self.path, self.arcs, self.colour, self.n
        where = {vertex: i for i, vertex in enumerate(path)}
        best, cuts, ties = n, None, 0
        for i in range(1, n):
            j = where[self.after[wanted][path[i - 1]]]
            for k in range(j + 1, n + 1) if j > i else ():
                joint = colour[path[k - 1]][path[i]]
                removed = (arcs[i - 1], arcs[j - 1]) if k == n else (arcs[i - 1], arcs[j - 1], arcs[k - 1])
                if self.count[joint] and joint not in removed:
                    continue  # brings in a colour that the path has already: never among the best
                added = (wanted, joint) if k == n else (wanted, joint, colour[path[j - 1]][path[k]])
                missing = self._missing_after(removed, added)
                ties = 1 if missing < best else ties + (missing == best)
                if missing < best or (missing == best and self.random() * ties < 1):
                    best, cuts = missing, (i, j, k)
                if missing == 0:
                    return best, cuts
        return best, cuts

    def _missing_after(self, removed: tuple[int, ...], added: tuple[int, ...]) -> int:
        missing = len(self.missing)
        for c in {*removed, *added}:
            left = self.count[c] - removed.count(c) + added.count(c)
            missing += (left == 0) - (self.count[c] == 0)
        return missing
