"""Partial gradients that are summed inside a node before they cross to another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..errors import refuse
from ..topology import Cluster
from .plan import Block, Heads, Kind, Move, Plan

SUM_IN_NODE = ("auto", "true", "false")


class Ready(NamedTuple):
    """A partial gradient, and the step from which on it may leave the rank that has computed it."""

    block: Block
    step: int


def check_nodes_are_known(setting: str, described: bool, n: int) -> None:
    """Refuse `true` for several ranks without a description of their cluster.

    Raises:
        ValueError: names what to say.
    """
    if setting == "true" and not described and n > 1:
        remedy = "Name the cluster, or set it to auto or false."
        raise refuse("attention.sum_in_node", "true", "parallelism.cluster, which says what the nodes are", remedy)


def ranks_to_sum(setting: str, cluster: Cluster | None, n: int) -> int:
    """The ranks of a node whose partial gradients are summed before they cross to another node; 0 for none.

    `auto` asks whether it pays: a byte less between nodes is one more within a node, so links there have to be faster
    than a rank's share of its node's NICs.

    Args:
        cluster: of `n` ranks; None where none is described.

    Raises:
        ValueError: `true` without a description that says what the nodes are.
    """
    check_nodes_are_known(setting, cluster is not None, n)
    if setting == "false" or cluster is None or cluster.ranks_per_node == 1 or cluster.ranks_per_node >= n:
        return 0
    pays = cluster.route(0, 1).gibps > cluster.network_share_gibps
    return cluster.ranks_per_node if setting == "true" or pays else 0


def summing_in_nodes(plan: Plan, ranks: int) -> Plan:
    """A forward plan whose backward sums in nodes of so many ranks (see `Plan.sum_in_node`); 0 for the plan as it is.

    Raises:
        ValueError: `plan` is a backward plan already.
    """
    if plan.backward:
        raise ValueError(f"plan {plan.name} is a backward plan: expected a forward plan. Say it of the forward plan.")
    return replace(plan, sum_in_node=ranks) if ranks else plan


def ways_home(ready: Sequence[Ready], node: int) -> Iterator[tuple[int, Move]]:
    """The moves of partial gradients, each with its step: straight home, but where several ranks of a node have one for
    the same rows of a rank of another node. Then the others send theirs to one of them, which sends the sum.

    Args:
        node: ranks of a node; 0 where all go straight.
    """
    crossing: dict[tuple[int, Kind, int, Heads], list[Ready]] = {}
    for each in ready:
        (kind, home, _, _, origin, heads), step = each
        if not node or origin // node == home // node:
            yield step, Move(each.block, origin, home)
        else:
            crossing.setdefault((origin // node, kind, home, heads), []).append(each)
    sums: dict[int, list[list[Ready]]] = {}  # by the step in which the last part may leave
    for found in crossing.values():
        for some in _overlapping(found):
            sums.setdefault(max(each.step for each in some), []).append(some)
    made: Counter[int] = Counter()  # by rank, tokens of the sums that it makes
    so_far: Counter[int] = Counter()  # by node, tokens of its sums that are whole in this step or later
    # What is whole last chooses first: it waits for no message if the rank that computes its last part makes the sum.
    # That rank does if it has less than its share of the node's sums so far, so that none has many at a time.
    for some in (some for step in sorted(sums, reverse=True) for some in _counted(sums[step], so_far, node)):
        whole = _whole(some)
        share = so_far[whole.origin // node]
        free = [each for each in some if made[each.block.origin] * node < share]
        last = max(free, key=lambda each: each.step) if free else min(some, key=lambda each: made[each.block.origin])
        relay, leaves = last.block.origin, 0
        made[relay] += whole.tokens
        for block, step in some:
            if block.origin != relay:
                yield step, Move(block, block.origin, relay)
            leaves = max(leaves, step if block.origin == relay else step + 2)
        yield leaves, Move(whole._replace(origin=relay), relay, whole.home)


def _counted(sums: list[list[Ready]], so_far: Counter[int], node: int) -> list[list[Ready]]:
    """The same, once all of their tokens are counted."""
    for some in sums:
        so_far[some[0].block.origin // node] += _whole(some).tokens
    return sums


def _whole(some: Sequence[Ready]) -> Block:
    """All of their rows, as the first's."""
    start, stop = min(each.block.start for each in some), max(each.block.stop for each in some)
    return some[0].block._replace(start=start, stop=stop)


def _overlapping(found: list[Ready]) -> Iterator[list[Ready]]:
    """Those whose rows overlap, of one kind, home and part of the heads."""
    some: list[Ready] = []
    stop = 0
    for each in sorted(found):
        if some and each.block.start >= stop:
            yield some
            some, stop = [], 0
        some.append(each)
        stop = max(stop, each.block.stop)
    yield some
