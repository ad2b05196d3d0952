"""Plans whose ranks keep what they have received in forward, so that backward exchanges only what is missing."""

from __future__ import annotations

from dataclasses import replace

from .plan import Attend, Block, Plan

KEEP_RECEIVED = ("auto", "true", "false")
KEPT_TOKENS = 32_768
"""Tokens (times sequences) of a rank up to which `auto` keeps what it receives. What keeping saves, an exchange, grows
with the tokens, and attention with their square: beyond this the memory is worth more."""


def keeps_received(setting: str, schedule: str, n: int, length: int, batch: int = 1) -> bool:
    """Whether calls keep what they receive: `auto` for ulysses, up to `KEPT_TOKENS`.

    There it takes the memory of a single tensor more, the output of the rank's heads: queries, keys and values lie in
    their place as the rank's own do otherwise.
    """
    if setting == "auto":
        return n > 1 and schedule == "ulysses" and -(-length // n) * batch <= KEPT_TOKENS
    return n > 1 and setting == "true"


def keeping(plan: Plan) -> Plan:
    """The forward plan `plan`, with all kept that a rank has received and attended.

    Queries are kept if one call of one rank computes all of their attention: then this rank has their whole out and
    lse, which backward needs. Others (of a helper, or of several calls) travel again.

    Raises:
        ValueError: `plan` is a backward plan already.
    """
    if plan.backward:
        raise ValueError(f"plan {plan.name} is a backward plan: expected a forward plan. Keep in the forward plan.")
    kept: list[set[Block]] = [set() for _ in range(plan.n)]
    computed = calls_by_home(plan)
    for step in plan.steps:
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                kept[rank].update(key for key in attend.keys if key.home != rank)
                away = [query for query in attend.queries if query.home != rank]
                if away and all(_only_in(attend, query, computed[query.home]) for query in attend.queries):
                    kept[rank].update(away)
    return replace(plan, kept=tuple(tuple(sorted(blocks)) for blocks in kept))


def calls_by_home(plan: Plan) -> list[list[tuple[Block, Attend]]]:
    """By rank, all calls of any rank that compute some of its queries."""
    found: list[list[tuple[Block, Attend]]] = [[] for _ in range(plan.n)]
    for step in plan.steps:
        for attends in step.attends:
            for attend in attends:
                for query in attend.queries:
                    found[query.home].append((query, attend))
    return found


def _only_in(attend: Attend, query: Block, calls: list[tuple[Block, Attend]]) -> bool:
    return all(call is attend or not other.overlaps(query) for other, call in calls)
