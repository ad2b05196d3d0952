"""The measured waiting for messages: there is some where a peer is late, and asking starts it anew."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.comm import P2PTransport
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import random_qkv, shard

LATE = 0.2


def _wait_for_a_late_peer(rank: int, folder: Path) -> list[float]:
    waiting = folder / "waiting"
    wait = P2PTransport.wait

    def told(*arguments: object) -> None:
        waiting.touch()
        wait(*arguments)

    attention = ContextParallelAttention(dist.group.WORLD, schedule="zigzag")
    assert attention.times() is None
    attention.measure_times()
    layout = attention.layout(16)
    q, k, v, _ = (shard(x, layout, rank) for x in random_qkv(16, 1, 2, 1, 8, torch.float32))
    found = []
    for late in (False, True):
        dist.barrier()
        if late and rank == 0:
            P2PTransport.wait = told  # type: ignore[assignment, method-assign]
        if late and rank == 1:
            while not waiting.exists():  # since rank 0 may itself be late
                time.sleep(0.01)
            time.sleep(LATE)
        attention(q, k, v, mask=16)
        times = attention.times()
        assert times is not None and times.computed_s > 0
        found.append(times.waited_s)
    rest = attention.times()
    assert rest is not None and rest.computed_s == 0
    alone = ContextParallelAttention(dist.new_subgroups(1)[0])
    alone.measure_times()
    alone(q, k, v, mask=q.shape[0])
    times = alone.times()
    assert times is not None and times.computed_s > 0
    return [*found, rest.waited_s, times.waited_s]


def test_a_rank_waits_for_its_late_peer(tmp_path: Path) -> None:
    for rank, (prompt, late, rest, alone) in enumerate(run_distributed(_wait_for_a_late_peer, 2, tmp_path)):
        assert prompt > 0 and rest == 0
        assert alone == 0, "who only computes does not wait"
        if rank == 0:
            assert late > LATE / 2
