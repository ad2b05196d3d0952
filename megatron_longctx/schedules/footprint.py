"""The memory that a program takes of a rank, read off its operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .cost import Workload
from .plan import Kind
from .program import Compute, Copy, Merge, Op, Program, Rows, Space


@dataclass(frozen=True)
class Footprint:
    """Bytes of one pass. inputs: of this rank's own tensors that it reads. buffers: of other ranks' blocks, shared by
    all passes. kept: from forward to backward, what is kept of other ranks', with this rank's own share. sent: send
    memory, which is there twice where peers read it. results: most at any time, of kernel calls until they were last
    read and of what they are merged into; with `workspace`, of kernels besides.
    """

    inputs: int
    buffers: int
    kept: int
    sent: int
    results: int

    @property
    def total(self) -> int:
        return self.inputs + self.buffers + self.kept + self.sent + self.results


def footprint(program: Program, workload: Workload, workspace: bool = False) -> Footprint:
    """Of a program over a workload's heads.

    Args:
        workspace: count what kernels need for themselves. cuDNN and FlashAttention-2 add dq up in fp32 and keep a sum
            for every query; where heads share keys and values they first make a dk and dv for every query head.
    """
    size = _Sizes(workload, program.backward and workspace)
    return Footprint(
        inputs=sum(workload.token_bytes(kind) for kind in program.reads_own) * program.num_tokens,
        buffers=sum(
            workload.token_bytes(each.kind, each.heads) * each.tokens for each in program.buffers if not each.kept
        ),
        kept=sum(row_bytes(rows, workload) for entry in program.kept for rows in entry),
        sent=program.sends.num_bytes * (2 if any(each.spans for some in program.receives for each in some) else 1),
        results=_most_results(program, size),
    )


def row_bytes(rows: Rows, workload: Workload) -> int:
    """Bytes of some rows where they lie; those of accumulators are wider."""
    size = workload.token_bytes(rows.kind, rows.heads) * (rows.stop - rows.start)
    return size * (workload.accumulator_bytes // workload.element_bytes or 1) if rows.space is Space.TOTAL else size


class _Sizes:
    def __init__(self, workload: Workload, workspace: bool) -> None:
        self.workload, self._workspace = workload, workspace

    def of_call(self, op: Compute, backward: bool) -> int:
        """What a kernel call gives."""
        kinds = ((Kind.DQ, op.queries), (Kind.DKV, op.keys)) if backward else ((Kind.OUT, op.queries),)
        return sum(self.workload.token_bytes(kind, rows.heads) * rows.tokens for kind, rows in kinds)

    def of_workspace(self, op: Compute) -> int:
        work, heads = self.workload, op.queries.heads
        if not self._workspace:
            return 0
        per_query = work.elements(Kind.Q, heads) * 4 + 4 * len(work.head_range(Kind.Q, heads)) * work.batch
        grouped = work.num_kv_heads < work.num_heads
        expanded = (
            (work.elements(Kind.Q, heads) + work.elements(Kind.GRAD, heads)) * work.element_bytes if grouped else 0
        )
        return op.queries.tokens * per_query + op.keys.tokens * expanded


def _most_results(program: Program, size: _Sizes) -> int:
    ops = program.ops
    sizes = {(rows.space, rows.number): row_bytes(rows, size.workload) for rows in (*program.totals, *program.results)}
    first: dict[tuple[Space, int], int] = {}
    last: dict[tuple[Space, int], int] = {}
    change = [0] * (len(ops) + 2)
    for number, op in enumerate(ops):
        for rows in _results_of(op):
            key = rows.space, rows.number
            first.setdefault(key, number)
            last[key] = number
        if isinstance(op, Compute):
            key = Space.CALL, op.number
            sizes[key], first[key] = size.of_call(op, program.backward), number
            workspace = size.of_workspace(op)
            change[number] += workspace
            change[number + 1] -= workspace
    kept = {(rows.space, rows.number) for entry in program.kept for rows in entry}
    own = {(rows.space, rows.number) for rows in program.own.values()}
    for key, start in first.items():
        if key in sizes and key not in kept:
            change[start] += sizes[key]
            change[len(ops) if key in own else last.get(key, start) + 1] -= sizes[key]
    most = now = 0
    for each in change:
        now += each
        most = max(most, now)
    return most


def _results_of(op: Op) -> Iterator[Rows]:
    """Rows that an operation reads or writes."""
    if isinstance(op, Copy):
        yield from (rows for pair in op.pairs for rows in pair)
    elif isinstance(op, Merge):
        yield op.into
        yield from (part.rows for part in op.parts)
