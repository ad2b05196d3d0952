"""The memory that a pass takes on its rank, counted from its operations."""

from dataclasses import dataclass
from itertools import accumulate, chain

from ..core.plans.plan import Heads, Kind
from ..core.plans.recording import Compute, Memory, Place, Recording, Rows, rows_read, rows_written
from ..core.plans.workload import Workload


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


def footprint(recording: Recording, workload: Workload, workspace: bool = False) -> Footprint:
    """Return the memory of a pass over a workload's heads.

    Args:
        workspace: count the memory that kernels need for themselves. In backward, cuDNN and FlashAttention-2 add dq in
            fp32 and keep a sum for every query. With grouped heads they first make a dk and dv of every query head.
    """
    read_by_peers = any(receive.spans for receives in recording.receives for receive in receives)
    return Footprint(
        inputs=sum(workload.token_bytes(kind) for kind in recording.reads_own) * recording.num_tokens,
        buffers=sum(workload.token_bytes(kind, Heads(0, parts)) * tokens for kind, parts, tokens in recording.slots),
        kept=sum(row_bytes(rows, workload) for entry in recording.kept for rows in entry),
        sent=recording.sends.num_bytes * (2 if read_by_peers else 1),
        results=_peak_of_results(recording, workload, recording.backward and workspace),
    )


def row_bytes(rows: Rows, workload: Workload) -> int:
    """Return the bytes of rows in their memory. Sums are wider than other memory."""
    size = workload.token_bytes(rows.kind, rows.heads) * (rows.stop - rows.start)
    if rows.memory.place is Place.SUM:
        size *= workload.accumulator_bytes // workload.element_bytes or 1
    return size


def _workspace_bytes(op: Compute, workload: Workload) -> int:
    heads = op.queries.heads
    q, out = (workload.elements(kind, heads) for kind in (Kind.Q, Kind.GRAD))
    per_query = 4 * (q + len(workload.head_range(Kind.Q, heads)) * workload.batch)
    per_key = (q + out) * workload.element_bytes if workload.num_kv_heads < workload.num_heads else 0
    return op.queries.tokens * per_query + op.keys.tokens * per_key


def _peak_of_results(recording: Recording, workload: Workload, workspace: bool) -> int:
    """Return the peak of kernel outputs, sums, results and workspaces.

    They are allocated when they are first used, and freed after their last use; final results and kept ones are not.
    """
    ops = recording.ops
    first: dict[Memory, int] = {}
    last: dict[Memory, int] = {}
    change = [0] * (len(ops) + 2)
    for number, op in enumerate(ops):
        for rows in chain(rows_read(op), rows_written(op)):
            if rows.memory.place in (Place.CALL, Place.SUM, Place.RESULT):
                first.setdefault(rows.memory, number)
                last[rows.memory] = number
        if workspace and isinstance(op, Compute):
            needed = _workspace_bytes(op, workload)
            change[number] += needed
            change[number + 1] -= needed
    kept = {rows.memory for entry in recording.kept for rows in entry}
    own = {rows.memory for rows in recording.own.values()}
    for memory, start in first.items():
        if memory not in kept:
            size = row_bytes(memory.rows(), workload)
            change[start] += size
            change[len(ops) if memory in own else last[memory] + 1] -= size
    return max(accumulate(change), default=0)
