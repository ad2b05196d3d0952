"""What a step sums up over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.comm import Times
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.step import LossSum, _reduce
from megatron_longctx.metrics.flops import Work
from megatron_longctx.testing.distributed import run_distributed


def test_measured_imbalance_is_that_of_the_worst_group() -> None:
    even, uneven = [2.0, 2.0], [1.0, 3.0]
    assert LossSum(0, 0, Work(0, 0, 0), computed_s=[even, uneven]).imbalance_pct == pytest.approx(50)
    assert LossSum(0, 0, Work(0, 0, 0), computed_s=[even]).imbalance_pct == pytest.approx(0)
    assert LossSum(0, 0, Work(0, 0, 0), computed_s=[[0.0, 0.0]]).imbalance_pct is None, "nothing was measured"


def _sums(rank: int) -> list[LossSum]:
    """Of 4 ranks, which differ in all that they have: once data x context parallel, once tensor x pipeline."""
    found = []
    for sizes in ({"context": 2}, {"tensor": 2, "pipeline": 2}):
        mesh = groups.initialize(**sizes)
        # Ranks of one tensor-parallel group have one loss, those of one context-parallel group one work.
        share = mesh.dp.rank() * mesh.cp.size() + mesh.cp.rank()
        losses = [torch.tensor([10.0**share, step], dtype=torch.float64) for step in (1, 2)]
        results = [{"loss": loss, "work": (7, 10 + mesh.dp.rank(), 100)} for loss in losses]
        found.append(_reduce(results, mesh, Times(0.5 + rank, 1.0 + rank)))
        found.append(_reduce(results, mesh, None))
        groups.destroy()
        dist.barrier()
    return found


@pytest.mark.usefixtures("on_cpu")
def test_every_rank_counts_once() -> None:
    for rank, (spread, unmeasured, one, _) in enumerate(run_distributed(_sums, 4)):
        assert (spread.loss_sum, spread.num_tokens, spread.work) == (2 * 1111, 4 * 3, Work(28, 42, 400))
        assert spread.computed_s == [[1.0, 2.0], [3.0, 4.0]] and spread.waited_s == 0.5 + rank, "its own"
        assert spread.imbalance_pct == pytest.approx(100 / 3), "of the first group: 2 s beside 1.5 s on average"
        assert unmeasured.waited_s is None and unmeasured.imbalance_pct is None
        assert (one.loss_sum, one.num_tokens, one.work) == (2, 3, Work(14, 20, 200)), "that of the last stage"
