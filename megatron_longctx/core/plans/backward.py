"""Backward plans, derived from forward plans: what ranks keep for them, and the way of gradients to their homes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..errors import refuse
from .plan import Attend, Block, Heads, Kind, Links, Move, Plan, Step, collector_paused, trim

KEPT_TOKENS = 32_768
"""The most tokens of a rank (times sequences) for which ulysses keeps what it receives, unless told otherwise. Keeping
saves an exchange, whose time grows with the tokens, while attention's time grows with their square. For more tokens,
memory is worth more."""
LEAST_TOKENS = 2048
"""The tokens of a rank below which its own block is not divided: smaller calls take as long as their launch."""


def keeps_received(setting: bool | None, schedule: str, n: int, length: int, batch: int = 1) -> bool:
    """Whether calls keep received blocks for backward: None does for ulysses, up to `KEPT_TOKENS`.

    With ulysses this takes the memory of a single additional tensor, the output of the rank's heads. The received
    queries, keys and values replace the rank's own.
    """
    if setting is None:
        return n > 1 and schedule == "ulysses" and -(-length // n) * batch <= KEPT_TOKENS
    return n > 1 and setting


def keep_received(plan: Plan) -> Plan:
    """Return the forward plan in which ranks keep all blocks that they have received and attended with.

    Queries are kept if one call of one rank computes all of their attention. Then this rank has their whole out and
    lse, which backward needs. Others (with helpers, or with several calls) travel again.
    """
    assert not plan.backward
    kept: list[set[Block]] = [set() for _ in range(plan.n)]
    computed: list[list[tuple[Block, Attend]]] = []
    for _, rank, attend in plan.calls():
        kept[rank].update(key for key in attend.keys if key.home != rank)
        away = [query for query in attend.queries if query.home != rank]
        if away:
            computed = computed or calls_by_home(plan)
            others = (other for query in attend.queries for other in computed[query.home] if other[0].overlaps(query))
            if all(call is attend for _, call in others):
                kept[rank].update(away)
    return replace(plan, kept=tuple(tuple(sorted(blocks)) for blocks in kept))


def calls_by_home(plan: Plan) -> list[list[tuple[Block, Attend]]]:
    """Return the calls of any rank, each with its block of queries, indexed by the home of these queries."""
    calls: list[list[tuple[Block, Attend]]] = [[] for _ in range(plan.n)]
    for _, _, attend in plan.calls():
        for query in attend.queries:
            calls[query.home].append((query, attend))
    return calls


def node_size_to_sum(setting: bool | None, cluster: Links | None, n: int) -> int:
    """Return the number of ranks of a node if their partial gradients are summed before they leave the node; else 0.

    Every byte that no longer crosses between nodes is sent within a node instead. So None sums if links within a node
    are faster than a rank's share of its node's NICs.

    Raises ValueError: True for several ranks without a cluster, which defines the nodes.
    """
    if setting and cluster is None and n > 1:
        remedy = "Give the options a cluster, or leave it at None or False."
        raise refuse("sum_in_node", True, "a cluster, which defines the nodes", remedy)
    if setting is False or cluster is None or cluster.ranks_per_node == 1 or cluster.ranks_per_node >= n:
        return 0
    return cluster.ranks_per_node if setting or cluster.network_is_slower else 0


def sum_in_nodes(plan: Plan, ranks: int) -> Plan:
    """Return the forward plan whose backward sums in nodes of `ranks` ranks (see `Plan.sum_in_node`); 0 for no sums."""
    assert not plan.backward
    return replace(plan, sum_in_node=ranks) if ranks else plan


@collector_paused()
def backward_plan(plan: Plan) -> Plan:
    """Return the backward plan that is executed: `transpose`, with work beside the first and the last messages.

    Keys and values arrive while a rank works on the first part of its own block, and the last gradients travel while it
    works on the rest.
    """
    backward = transpose(plan)
    if len(backward.steps) < 2 or any(backward.steps[-1].attends):
        return backward
    # The last message after a sum within a node does not wait for any call, so work in the step before it hides both.
    at = len(backward.steps) - (2 if len(backward.steps) > len(plan.steps) + 1 else 1)
    first, *rest = backward.steps
    divided = [divide_own(attends, rank) for rank, attends in enumerate(first.attends)]
    rest[at - 1] = rest[at - 1]._replace(attends=tuple(after for _, after in divided))
    return replace(backward, steps=(first._replace(attends=tuple(before for before, _ in divided)), *rest))


def divide_own(attends: tuple[Attend, ...], rank: int) -> tuple[tuple[Attend, ...], tuple[Attend, ...]]:
    """Divide the queries of a rank's own block into halves, to be computed first and last, unless they are few."""
    is_own = all(block.home == rank for attend in attends for block in (*attend.queries, *attend.keys))
    if not is_own or [len(each.queries) for each in attends] != [1] or attends[0].num_queries < LEAST_TOKENS:
        return attends, ()
    return attends[0].halves()


def transpose(plan: Plan) -> Plan:
    """Return the backward plan with the same pairs on the same ranks: inputs travel as in forward, gradients go home.

    A rank that attended to another rank's keys sends its partial dK, dV directly to their home after its last call on
    them, and the home adds up what arrives in fp32. The messages have the precision of the kernel's output. This loses
    nothing and moves half the bytes of an accumulator that travels the ring in fp32. The same holds for queries that a
    helper attended with. If `plan.sum_in_node` is set, one rank of a node adds up the gradients of its ranks for a rank
    of another node and sends the sum.

    Blocks in `plan.kept` do not travel again; for kept queries only the gradient of out does.
    """
    assert not plan.backward
    gradients = _gradient_moves(plan)
    inputs = {Kind.KV: (Kind.KV,), Kind.Q: (Kind.Q_GRAD, Kind.GRAD) if plan.kept else (Kind.Q_GRAD,)}
    steps: list[Step] = []
    for t, step in enumerate(plan.steps):
        moves = tuple(
            move if kind is move.block.kind else move._replace(block=move.block._replace(kind=kind))
            for move in step.moves
            for kind in inputs.get(move.block.kind, ())
        )
        steps.append(Step(moves + tuple(gradients.get(t, ())), step.attends))
    for t in range(len(steps), max(gradients, default=-1) + 1):
        steps.append(Step(tuple(gradients.get(t, ())), ((),) * plan.n))
    backward = replace(plan, steps=tuple(steps), backward=True)
    return trim(backward) if plan.kept else backward


class _Partial(NamedTuple):
    """A partial gradient, and the first step in which it may leave the rank that has computed it."""

    block: Block
    step: int


def _gradient_moves(plan: Plan) -> dict[int, list[Move]]:
    """Return the moves of gradients to their homes, keyed by step: the one after the last call that adds to them.

    Overlapping gradients travel as one, so that nothing is sent twice. These are the backward plan's
    `Plan.remote_results`, but without a block for each call: plans of many ranks have millions of calls.
    """
    away: dict[tuple[int, Kind, int, Heads], list[tuple[int, int, int]]] = {}
    for t, rank, attend in plan.calls():
        for kind, blocks in ((Kind.DKV, attend.keys), (Kind.DQ, attend.queries)):
            for _, home, start, stop, _, heads in blocks:
                if home != rank:
                    away.setdefault((rank, kind, home, heads), []).append((start, stop, t))
    partials = []
    for (rank, kind, home, heads), computed in away.items():
        computed.sort()
        first, open_stop, last = computed[0]
        for start, stop, t in computed:
            if start >= open_stop:
                partials.append(_Partial(Block(kind, home, first, open_stop, rank, heads), last + 1))
                first, open_stop, last = start, stop, t
            else:
                open_stop, last = max(open_stop, stop), max(last, t)
        partials.append(_Partial(Block(kind, home, first, open_stop, rank, heads), last + 1))
    moves: dict[int, list[Move]] = {}
    for t, move in _ways_home(partials, plan.sum_in_node):
        moves.setdefault(t, []).append(move)
    return moves


def _ways_home(partials: Iterable[_Partial], node: int) -> Iterator[tuple[int, Move]]:
    """Yield the moves of partial gradients with their steps.

    They go directly home, except if several ranks of a node have gradients for the same rows of a rank in another node.
    Then the others send theirs to one of them, which sends the sum.

    node: the ranks of a node; 0 if all go directly.
    """
    crossing: dict[tuple[int, Kind, int, Heads], list[_Partial]] = {}
    for each in partials:
        (kind, home, _, _, origin, heads), step = each
        if not node or origin // node == home // node:
            yield step, Move(each.block, origin, home)
        else:
            crossing.setdefault((origin // node, kind, home, heads), []).append(each)
    sums: dict[int, list[list[_Partial]]] = {}  # keyed by the step in which the last part may leave
    for some in crossing.values():
        for parts in _overlapping(some):
            sums.setdefault(max(each.step for each in parts), []).append(parts)
    summed: Counter[int] = Counter()  # tokens of the sums that a rank makes
    complete: Counter[int] = Counter()  # tokens of a node's sums that are complete in this step or later
    # Sums that are complete last choose their rank first. A sum waits for no message if the rank that computes its last
    # part makes it. That rank does if it has less than its share of the node's sums so far, so that none has many at a
    # time.
    for step in sorted(sums, reverse=True):
        for parts in sums[step]:
            complete[parts[0].block.origin // node] += _union(parts).tokens
        for parts in sums[step]:
            whole = _union(parts)
            share = complete[whole.origin // node]
            free = [each for each in parts if summed[each.block.origin] * node < share]
            if free:
                relay = max(free, key=lambda each: each.step).block.origin
            else:
                relay = min((each.block.origin for each in parts), key=summed.__getitem__)
            leaves = 0
            summed[relay] += whole.tokens
            for block, ready in parts:
                if block.origin != relay:
                    yield ready, Move(block, block.origin, relay)
                leaves = max(leaves, ready if block.origin == relay else ready + 2)
            yield leaves, Move(whole._replace(origin=relay), relay, whole.home)


def _union(parts: Sequence[_Partial]) -> Block:
    """Return a block of the rows of all parts, with the origin of the first."""
    start, stop = min(each.block.start for each in parts), max(each.block.stop for each in parts)
    return parts[0].block._replace(start=start, stop=stop)


def _overlapping(partials: list[_Partial]) -> Iterator[list[_Partial]]:
    """Yield groups of partial gradients whose rows overlap; all are of one kind, home and part of the heads."""
    group: list[_Partial] = []
    stop = 0
    for each in sorted(partials):
        if group and each.block.start >= stop:
            yield group
            group, stop = [], 0
        group.append(each)
        stop = max(stop, each.block.stop)
    yield group
