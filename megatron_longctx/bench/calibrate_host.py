"""Measuring what the host takes to issue an attention pass, by passes that ask next to nothing of the device."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from ..attention.engine import Engine
from ..attention.executor import ForwardPass
from ..attention.program import compile_program
from ..comm import BufferPool, Transport
from ..inference.ledger import CacheLedger
from ..inference.plan import MODES, Batch, CachePlan, build
from ..kernels import AttentionKernel
from ..schedules import Kind, Workload
from ..schedules.host import num_operations

_CACHED, _NEW = 64, 16
"""Tokens a rank: kernel calls are as short as they get."""
_REPEATS = 30


def host_operation_seconds(links: Transport, kernel: AttentionKernel, workload: Workload, dtype: torch.dtype) -> float:
    """Seconds of one operation (see `num_operations`) of the median rank's host, in the median mode of inference.

    All ranks call this at once, and get the same answer. What the host does besides for the rest of a layer is not in
    it, nor what it does for a prompt as a whole.
    """
    n = links.world
    ledger = CacheLedger(n, 2, _CACHED)
    session = ledger.open()
    ledger.append({session: n * _CACHED})
    batch = Batch(n, ledger.slots_per_rank, ledger.append({session: n * _NEW}))
    on = Engine(kernel, links, BufferPool(links.device))
    found = []
    for mode in MODES:
        plan = build(mode, batch)
        found.append(_pass_seconds(on, plan, workload, dtype) / num_operations(plan))
    of_ranks: list[float] = [0.0] * n
    dist.all_gather_object(of_ranks, statistics.median(found), group=links.group)
    return statistics.median(of_ranks)


def _pass_seconds(on: Engine, plan: CachePlan, workload: Workload, dtype: torch.dtype) -> float:
    """Of one of many in a row, by the clock."""
    assert on.transport is not None
    rank, device = on.transport.rank, on.transport.device
    program = compile_program(plan, rank)
    heads, kv_heads, dim = workload.num_heads, workload.num_kv_heads, workload.head_dim
    q = torch.randn(plan.batch.num_rows(rank), 1, heads, dim, device=device).to(dtype)
    cache = torch.randn(plan.batch.slots, 2, 1, kv_heads, dim, device=device).to(dtype)

    @torch.inference_mode()
    def several(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run = ForwardPass(program, on, {Kind.Q: (q,), Kind.KV: (cache,)}, dim**-0.5)
            run.run()
            run.output.finish()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / count

    several(3)
    return statistics.median(several(_REPEATS) for _ in range(3))
