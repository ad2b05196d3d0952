"""The measured time of waiting for messages, which contains that for a late peer and restarts after every reading."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.comm import P2PTransport
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import random_qkv, shard
from tests.core.attention.test_attention_gpu import CASES

LATE = 0.2


def _wait_for_a_late_peer(rank: int, folder: Path) -> list[float]:
    waiting = folder / "waiting"
    wait = P2PTransport.wait

    def announced(*arguments: object) -> None:
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
            P2PTransport.wait = announced  # type: ignore[assignment, method-assign]
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
        assert alone == 0, "a single rank does not wait"
        if rank == 0:
            assert late > LATE / 2


MODES = ("zigzag", "ulysses")  # messages beside computation; messages that are read in the peers' memory
PASSES = ("forward", "backward")
REPEATS = 3
CYCLES = 2 * 10**8
"""The late rank's sleep before its pass, about 0.1 s: much longer than the differences between ranks on time."""


class Measured(NamedTuple):
    """The seconds that this rank waited and slept in `REPEATS` passes forward and backward."""

    waited: float
    slept: float


class _Rank:
    def __init__(self, rank: int, schedule: str) -> None:
        device, self._mask = torch.device("cuda", torch.cuda.current_device()), CASES[0].mask
        # The kernel prepares nothing per shape.
        self.attention = ContextParallelAttention(dist.group.WORLD, schedule=schedule, transport="peer", kernel="flash")
        layout = self.attention.layout(self._mask)
        self._leaves = [shard(x, layout, rank) for x in CASES[0].tensors(device)]
        self._rank = rank
        self._slept: list[tuple[Any, Any]] = []

    def passes(self, late: str | None = None) -> None:
        """Run forward and backward, which all ranks start together; rank 1 sleeps before the one that is `late`."""
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
        for _ in range(REPEATS):
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


@pytest.mark.gpu(2, shared=False)
def test_passes_measure_how_long_they_wait_for_a_late_peer() -> None:
    early, late = run_distributed(_measure, 2, backend="nccl", timeout=120)
    for schedule in MODES:
        prompt = early[schedule, None].waited
        for name in PASSES:
            waited, slept = early[schedule, name].waited, late[schedule, name].slept
            what = f"{schedule}, late {name}: {waited} s of {slept} s, {prompt} s without a late rank"
            assert slept / 2 < waited < 3 * slept, what
            assert 0 < prompt < slept / 4, what
            assert late[schedule, name].waited < slept / 2, (
                f"{what}; the late rank itself {late[schedule, name].waited} s"
            )
