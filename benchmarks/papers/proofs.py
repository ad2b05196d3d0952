"""Proofs that the plans of a page's tables compute attention, by `verify`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from megatron_longctx.schedules import Plan
from megatron_longctx.schedules.verify import verify

from .page import Cell, Table, cell


class Proof(NamedTuple):
    """Plans of one row. tokens: in words. backward: None where a page has no backward pass."""

    mode: str
    tokens: str
    forward: Plan
    backward: Plan | None = None


def proofs(cases: Iterable[Proof]) -> Table:
    """A row for every case, in milliseconds of one core.

    Raises:
        PlanError: a plan that does not compute attention.
    """
    rows: list[list[Cell]] = []
    for mode, tokens, forward, backward in cases:
        plans = [forward] if backward is None else [forward, backward]
        begin = time.process_time()
        for plan in plans:
            verify(plan, forward if plan is backward else None)
        seconds = time.process_time() - begin
        rows.append([
            *(mode, str(forward.n), tokens, "forward" if backward is None else "forward, backward"),
            cell(sum(plan.mask.pairs for plan in plans) / 1e6, "p", 1),
            cell(sum(len(step.moves) for plan in plans for step in plan.steps), "p", 0),
            cell(1e3 * seconds, "c", 1),
        ])  # fmt: skip
    columns = ["mode", "ranks", "tokens", "passes", "visible pairs, millions", "messages", "ms of one core"]
    return Table("proofs", "proofs of these plans", columns, rows)
