"""What the host takes to issue a pass: where its calls are short, the device waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .plan import RESULTS, Attend, Move, Plan

MERGED_AT_ONCE = 4
"""Partial results that one kernel brings together (`kernels.MOST_PARTIALS`); later ones join what it has written."""


def _one(attend: Attend) -> int:
    return 1


@dataclass(frozen=True)
class Host:
    """A rank's host, which issues one operation after the other.

    operation_s: seconds of one: a kernel call, a merge of partial results, all messages of a step. calls: of how many
    kernel calls one of the plan's consists.
    """

    operation_s: float
    calls: Callable[[Attend], int] = _one


class HostLane:
    """When the hosts of all ranks have issued what they issue, step after step of a forward plan."""

    def __init__(self, n: int, host: Host) -> None:
        self._host = host
        self._issued = [0.0] * n
        self._own = [0] * n  # partial results of a rank's own queries, its calls' and those that arrive
        self._away: list[Counter[int]] = [Counter() for _ in range(n)]  # by home, not sent yet

    def call(self, rank: int, attend: Attend) -> float:
        """A kernel call, in as many as it consists of."""
        count = self._host.calls(attend)
        for query in attend.queries:
            if query.home == rank:
                self._own[rank] += count
            else:
                self._away[rank][query.home] += count
        return self._issue(rank, count)

    def messages(self, moves: Sequence[Move]) -> list[float]:
        """A step's messages, by rank; what they bring home in several parts is merged before."""
        counts = [0] * len(self._issued)
        for rank in {rank for move in moves for rank in (move.source, move.destination)}:
            counts[rank] = 1
        for block, source, destination, _ in moves:
            if block.kind in RESULTS:
                counts[source] += num_merges(self._away[source].pop(block.home, 0))
                self._own[destination] += destination == block.home
        return [self._issue(rank, count) for rank, count in enumerate(counts)]

    def last(self, rank: int) -> float:
        """The merge of a rank's own results."""
        return self._issue(rank, num_merges(self._own[rank]))

    def _issue(self, rank: int, count: int) -> float:
        self._issued[rank] += count * self._host.operation_s
        return self._issued[rank]


def num_merges(partials: int) -> int:
    """Kernels that bring so many partial results together."""
    return max(0, -(-(partials - 1) // (MERGED_AT_ONCE - 1)))


def num_operations(plan: Plan, calls: Callable[[Attend], int] = _one) -> int:
    """Of the host with the most of them, in a forward plan."""
    lane = HostLane(plan.n, Host(1.0, calls))
    for step in plan.steps:
        lane.messages(step.moves)
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                lane.call(rank, attend)
    return round(max(lane.last(rank) for rank in range(plan.n)))
