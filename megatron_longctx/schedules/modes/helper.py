"""DistFlashAttn's balanced schedule: ranks that see few keys compute for ranks that see many (paper, section 3.2).

On the contiguous layout rank r has r remote blocks to attend to, so the first ranks would idle. In step t rank r either
works for itself, over the keys of rank r-t, or, if it has no keys left to attend to, fetches the queries of rank r-t+n,
attends to its own keys with them and sends the partial result back. About n/2 steps do the work of a ring's n. The data
that helpers move (queries and outputs, in backward queries, outputs and gradients) is (heads / KV heads) times larger
than keys.

Two things are not in the paper. For even n its last step has n/2 pairs for n ranks: half of them idle for a whole
block, so that n ranks reach n / (n + 1) of their speed at most (80% for 4). Here worker and helper share such a pair,
half of the queries each, and no rank idles. And a rank reserves a part of its own block for the end, while results
travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ..backward import LEAST_TOKENS
from ..plan import Attend, Kind, Move, Plan, Step
from ..visibility import Visibility
from .mode import Mode


@dataclass(frozen=True)
class Helper(Mode):
    """shares: worker and helper share the last pairs of even n; False for the paper's own schedule (Algorithm 2)."""

    shares: bool = True

    name = "helper"
    layout = "contiguous"

    def plan(self, visible: Visibility) -> Plan:
        """No slot is idle; without `shares`, half of the last step's are for even n.

        If a rank sees keys of later ranks, there is nothing to balance, and every rank works for itself.
        """
        n = visible.queries.n
        causal = not any(visible.between(r, home) for r in range(n) for home in range(r + 1, n))
        num_steps = n // 2 + 1 if causal else n
        calls = [[_calls(visible, r, t, causal, self.shares) for r in range(n)] for t in range(num_steps)]
        own = [_divide_own(attends) if self.shares else (attends, ()) for attends in calls[0]]
        calls = [[first for first, _ in own], *calls[1:], [last for _, last in own]]
        steps: list[Step] = []
        results: tuple[Move, ...] = ()
        nothing: list[tuple[Attend, ...]] = [()] * n
        for attends, following in pairwise([*calls, nothing]):
            fetches = tuple(
                Move(block, block.home, r)
                for r, each in enumerate(following)
                for attend in each
                for block in (*attend.queries, *attend.keys)
                if block.home != r
            )
            steps.append(Step(fetches + results, tuple(attends)))
            results = tuple(
                Move(query.result(Kind.OUT, r), r, query.home)
                for r, each in enumerate(attends)
                for attend in each
                for query in attend.queries
                if query.home != r
            )
        if len(steps) > 1 and not steps[-1].moves and not any(steps[-1].attends):
            steps.pop()
        return Plan(self.name, visible.mask, visible.queries, visible.keys, tuple(steps))


def _calls(visible: Visibility, rank: int, t: int, causal: bool, shares: bool) -> tuple[Attend, ...]:
    """Return the calls of `rank` in step `t`: for itself (a worker), for another rank (a helper), or none."""
    n = visible.queries.n
    if t <= rank or not causal:
        calls, half = visible.attend_all(rank, (rank - t) % n), 0
    else:
        calls, half = visible.attend_all(rank - t + n, rank), 1
    if causal and t and 2 * t == n:  # even n, last step: two ranks for each pair
        return _halves(calls)[half] if shares else calls[half:]
    return calls


def _halves(calls: tuple[Attend, ...]) -> tuple[tuple[Attend, ...], tuple[Attend, ...]]:
    """Divide the queries of every call into two halves."""
    first = [call.part(0, call.num_queries // 2) for call in calls]
    last = [call.part(call.num_queries // 2, call.num_queries) for call in calls]
    return tuple(filter(None, first)), tuple(filter(None, last))


def _divide_own(calls: tuple[Attend, ...]) -> tuple[tuple[Attend, ...], tuple[Attend, ...]]:
    """Divide a rank's own block into a part beside the first messages and a part beside the last ones."""
    return (calls, ()) if sum(each.num_queries for each in calls) < LEAST_TOKENS else _halves(calls)
