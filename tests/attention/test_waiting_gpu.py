"""Passes measure on the device how long they wait for a late peer."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import shard
from tests.attention.test_attention_gpu import CASES

pytestmark = pytest.mark.gpu(2, shared=False)

MODES = ("zigzag", "ulysses")  # messages beside computing; messages that are read where they lie
PASSES = ("forward", "backward")
AGAIN = 3
CYCLES = 2 * 10**8
"""For which the late rank sleeps before its pass: some 0.1 s, beside which ranks that start together differ little."""


class Measured(NamedTuple):
    """Of `AGAIN` passes forward and backward: what this rank has waited and slept, in seconds."""

    waited: float
    slept: float


class _Rank:
    def __init__(self, rank: int, schedule: str) -> None:
        device, self._mask = torch.device("cuda", torch.cuda.current_device()), CASES[0].mask
        # A kernel that prepares nothing for a shape.
        self.attention = ContextParallelAttention(dist.group.WORLD, schedule=schedule, transport="peer", kernel="flash")
        layout = self.attention.layout(self._mask)
        self._leaves = [shard(x, layout, rank) for x in CASES[0].tensors(device)]
        self._rank = rank
        self._slept: list[tuple[Any, Any]] = []

    def passes(self, late: str | None = None) -> None:
        """Forward and backward, each begun together; rank 1 sleeps before the one that is `late`."""
        leaves = [x.detach().requires_grad_() for x in self._leaves[:3]]
        self._begin(late == "forward")
        out = self.attention(*leaves, mask=self._mask)
        self._begin(late == "backward")
        torch.autograd.grad(out, leaves, self._leaves[3])

    def _begin(self, late: bool) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        if late and self._rank == 1:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            end.record()
            self._slept.append((begin, end))

    def measure(self, late: str | None) -> Measured:
        self.attention.times()
        self._slept = []
        for _ in range(AGAIN):
            self.passes(late)
        waited = self.attention.times().waited_s
        return Measured(waited, sum(begin.elapsed_time(end) for begin, end in self._slept) / 1e3)


def _measure(rank: int) -> dict[tuple[str, str | None], Measured]:
    found = {}
    for schedule in MODES:
        ranks = _Rank(rank, schedule)
        ranks.attention.measure_times()
        for _ in range(3):
            ranks.passes()
        for late in (None, *PASSES):
            found[schedule, late] = ranks.measure(late)
    return found


def test_passes_measure_how_long_they_wait_for_a_late_peer() -> None:
    early, late = run_distributed(_measure, 2, backend="nccl", timeout=120)
    for schedule in MODES:
        prompt = early[schedule, None].waited
        for name in PASSES:
            waited, slept = early[schedule, name].waited, late[schedule, name].slept
            said = f"{schedule}, late {name}: {waited} s of {slept} s, {prompt} s where nobody was late"
            assert slept / 2 < waited < 3 * slept, said
            assert 0 < prompt < slept / 4, said
            assert late[schedule, name].waited < slept / 2, (
                f"{said}; the late rank itself {late[schedule, name].waited} s"
            )
