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

from dataclasses import dataclass
from itertools import pairwise

from ..backward import divide_own
from ..plan import Attend, Move, Plan, Step, fetch_moves, return_moves
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
        own = [divide_own(attends, r) if self.shares else (attends, ()) for r, attends in enumerate(calls[0])]
        calls = [[first for first, _ in own], *calls[1:], [last for _, last in own]]
        steps: list[Step] = []
        results: list[Move] = []
        nothing: list[tuple[Attend, ...]] = [()] * n
        for attends, following in pairwise([*calls, nothing]):
            steps.append(Step((*fetch_moves(following), *results), tuple(attends)))
            results = return_moves(steps[-1:])
        if len(steps) > 1 and not steps[-1].moves and not any(steps[-1].attends):
            steps.pop()
        return Plan(self.name, visible.mask, visible.queries, visible.keys, tuple(steps))


def _calls(visible: Visibility, rank: int, t: int, causal: bool, shares: bool) -> tuple[Attend, ...]:
    """Return the calls of `rank` in step `t`: for itself (a worker), for another rank (a helper), or none."""
    n = visible.queries.n
    if t <= rank or not causal:
        calls, half = visible.attend(rank, visible.all_keys[(rank - t) % n]), 0
    else:
        calls, half = visible.attend(rank - t + n, visible.all_keys[rank]), 1
    if causal and t and 2 * t == n:  # even n, last step: two ranks for each pair
        return tuple(part for call in calls for part in call.halves()[half]) if shares else calls[half:]
    return calls
