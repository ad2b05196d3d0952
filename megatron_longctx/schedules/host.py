"""How many operations the host issues for a pass: where its calls are short, the device waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .plan import RESULTS, Attend, Plan, Step

MERGED_AT_ONCE = 4
"""Partial results that one kernel brings together (`kernels.MOST_PARTIALS`); later ones join what it has written."""


def _one(attend: Attend) -> int:
    return 1


def num_operations(plan: Plan, calls: Callable[[Attend], int] = _one) -> int:
    """Kernel calls, merges of partial results and steps with messages, in a forward plan, of the host with the most of
    them. calls: of how many kernel calls one of the plan's consists."""
    ranks = [_Rank(rank, calls) for rank in range(plan.n)]
    for step in plan.steps:
        for each in ranks:
            each.step(step)
    return max(each.operations + num_merges(each.own) for each in ranks)


def num_merges(partials: int) -> int:
    """Kernels that bring so many partial results together."""
    return max(0, -(-(partials - 1) // (MERGED_AT_ONCE - 1)))


class _Rank:
    """One rank's host. own: partial results of the rank's own queries, those of its calls and those that arrive."""

    def __init__(self, rank: int, calls: Callable[[Attend], int]) -> None:
        self.operations = 0
        self.own = 0
        self._rank, self._calls = rank, calls
        self._away: Counter[int] = Counter()  # partial results by home, not sent yet

    def step(self, step: Step) -> None:
        rank = self._rank
        moves = [move for move in step.moves if rank in (move.source, move.destination)]
        self.operations += bool(moves)
        for block, source, destination, _ in moves:
            if block.kind in RESULTS:  # what brings several parts home is merged before
                if source == rank:
                    self.operations += num_merges(self._away.pop(block.home, 0))
                self.own += destination == rank == block.home
        for attend in step.attends[rank]:
            count = self._calls(attend)
            self.operations += count
            for query in attend.queries:
                if query.home == rank:
                    self.own += count
                else:
                    self._away[query.home] += count
