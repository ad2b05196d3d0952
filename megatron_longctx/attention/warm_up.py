"""Kernels that are compiled for kinds of calls: for all that a run may bring, before the first call is made."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product, starmap
from typing import NamedTuple

import torch

from ..kernels import CallKind
from ..schedules import Lowering, backward_plan
from ..schedules.mask import FAR
from .function import Passes


class _Compiled(NamedTuple):
    """What a kernel is compiled for; heads: of queries and of keys."""

    backward: bool
    kind: CallKind
    heads: tuple[int, int]


def compile_kinds(every: Iterable[Passes], varied: bool) -> None:
    """Make a small call of every kind that passes have. varied: see `ContextParallelAttention.expect`."""
    found: dict[_Compiled, Passes] = {}
    for passes in every:
        for each in kinds(passes, varied) if passes.engine.kernel.compiles else ():
            found.setdefault(each, passes)
    for each, passes in found.items():
        _call(each, passes)


def kinds(passes: Passes, varied: bool) -> set[_Compiled]:
    """Of a rank's calls; where documents may lie elsewhere, all that a mask with or without windows can come to."""
    workload, found = passes.shapes.workload, set()
    # One rank alone sees no whole blocks, unless long causal segments are cut.
    whole = passes.plan.n > 1 or passes.target.takes.longest_causal != FAR
    windows, rights = passes.plan.mask.has_windows, {True, not whole}
    others = list(starmap(CallKind, product((False, True), {False, windows}, rights))) if varied else []
    for plan in (passes.plan, backward_plan(passes.plan)):
        for op in Lowering(plan, passes.target).program(passes.rank).calls:
            heads = [len(workload.head_range(rows.kind, rows.heads)) for rows in (op.queries, op.keys)]
            own = CallKind.of(op.call, (op.queries.tokens, op.keys.tokens))
            found |= {_Compiled(plan.backward, kind, (heads[0], heads[1])) for kind in (own, *others)}
    return found


def _call(each: _Compiled, passes: Passes) -> None:
    shapes, call = passes.shapes, each.kind.example
    (_, rows), heads = call.q_span, each.heads

    def zeros(count: int, channels: int) -> torch.Tensor:
        return torch.zeros(rows, 1, count, channels, dtype=shapes.dtype, device=shapes.device)

    d, e = shapes.workload.head_dim, shapes.workload.value_dim
    q, k, v = zeros(heads[0], d), zeros(heads[1], d), zeros(heads[1], e)
    kernel, scale = passes.engine.kernel, d**-0.5
    if each.backward:
        out, lse = zeros(heads[0], e), torch.zeros(rows, 1, heads[0], device=shapes.device)
        kernel.backward(out, q, k, v, out, lse, call, scale=scale)
    else:
        kernel.forward(q, k, v, call, scale=scale)
