"""The memory that a program takes on its rank, counted from its operations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

from ..core.plans.plan import Kind
from ..core.plans.program import Compute, Program, Rows, Space, rows_read, rows_written
from .cost import Workload


@dataclass(frozen=True)
class Footprint:
    """The memory of one pass in bytes."""

    inputs: int  # this rank's own tensors that the pass reads
    buffers: int  # blocks of other ranks; all passes share them
    kept: int  # what forward keeps for backward: blocks of other ranks, with this rank's own among them
    sent: int  # send memory, counted twice if peers read it
    results: int  # the peak of kernel outputs until their last read, of what they are merged into, and of workspaces

    @property
    def total(self) -> int:
        return self.inputs + self.buffers + self.kept + self.sent + self.results


def footprint(program: Program, workload: Workload, workspace: bool = False) -> Footprint:
    """Return the memory of a program over a workload's heads.

    Args:
        workspace: count the memory that kernels need for themselves. In backward, cuDNN and FlashAttention-2 add dq in
            fp32 and keep a sum for every query. With grouped heads they first make a dk and dv of every query head.
    """
    buffers = (buffer for buffer in program.buffers if not buffer.kept)
    read_by_peers = any(receive.spans for receives in program.receives for receive in receives)
    return Footprint(
        inputs=sum(workload.token_bytes(kind) for kind in program.reads_own) * program.num_tokens,
        buffers=sum(workload.token_bytes(each.kind, each.heads) * each.tokens for each in buffers),
        kept=sum(row_bytes(rows, workload) for entry in program.kept for rows in entry),
        sent=program.sends.num_bytes * (2 if read_by_peers else 1),
        results=_peak_of_results(program, workload, program.backward and workspace),
    )


def row_bytes(rows: Rows, workload: Workload) -> int:
    """Return the bytes of rows in their memory. Accumulators are wider than other memory."""
    size = workload.token_bytes(rows.kind, rows.heads) * (rows.stop - rows.start)
    if rows.space is Space.ACCUMULATOR:
        size *= workload.accumulator_bytes // workload.element_bytes or 1
    return size


def _output_bytes(op: Compute, workload: Workload, backward: bool) -> int:
    outputs = ((Kind.DQ, op.queries), (Kind.DKV, op.keys)) if backward else ((Kind.OUT, op.queries),)
    return sum(workload.token_bytes(kind, rows.heads) * rows.tokens for kind, rows in outputs)


def _workspace_bytes(op: Compute, workload: Workload) -> int:
    heads = op.queries.heads
    q, out = (workload.elements(kind, heads) for kind in (Kind.Q, Kind.GRAD))
    per_query = 4 * (q + len(workload.head_range(Kind.Q, heads)) * workload.batch)
    per_key = (q + out) * workload.element_bytes if workload.num_kv_heads < workload.num_heads else 0
    return op.queries.tokens * per_query + op.keys.tokens * per_key


def _peak_of_results(program: Program, workload: Workload, workspace: bool) -> int:
    """Return the peak of kernel outputs, accumulators, results and workspaces.

    They are allocated when they are first used, and freed after their last use; final results and kept ones are not.
    """
    ops = program.ops
    sizes = {(rows.space, rows.number): row_bytes(rows, workload) for rows in (*program.accumulators, *program.results)}
    first: dict[tuple[Space, int], int] = {}
    last: dict[tuple[Space, int], int] = {}
    change = [0] * (len(ops) + 2)
    for number, op in enumerate(ops):
        for rows in chain(rows_read(op), rows_written(op)):
            key = rows.space, rows.number
            first.setdefault(key, number)
            last[key] = number
        if isinstance(op, Compute):
            key = Space.CALL, op.number
            sizes[key], first[key] = _output_bytes(op, workload, program.backward), number
            needed = _workspace_bytes(op, workload) if workspace else 0
            change[number] += needed
            change[number + 1] -= needed
    kept = {(rows.space, rows.number) for entry in program.kept for rows in entry}
    own = {(rows.space, rows.number) for rows in program.own.values()}
    for key, start in first.items():
        if key in sizes and key not in kept:
            change[start] += sizes[key]
            change[len(ops) if key in own else last.get(key, start) + 1] -= sizes[key]
    return max(accumulate(change), default=0)
