"""Whole passes: at which lengths, of which modes and how often; kernel calls under load."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.bench.calibrate import Effort
from megatron_longctx.bench.calibrate_modes import Modes, Steps, worth_measuring
from megatron_longctx.bench.timing import num_loading_calls, put_under_load, sustained_seconds
from megatron_longctx.schedules import Costs, Workload
from megatron_longctx.schedules.cost import ModeSample
from megatron_longctx.schedules.select import Problem, rank_modes
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.topology import Cluster, Mesh

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
GQA, SMALL = Workload(32, 8, 128), Workload(4, 2, 16, element_bytes=4)
COSTS = Costs(600.0, 500.0)


@pytest.mark.parametrize(
    ("device", "most", "length", "expected"),
    [
        (CUDA, None, None, (8192, 32768)),
        (CUDA, None, 131072, (8192, 32768, 131072)),
        (CUDA, None, 10001, (8192, 10001, 32768)),
        (CUDA, None, 32768, (8192, 32768)),
        (CUDA, None, 8191, (8192, 32768)),
        (CUDA, 2048, 6000, (4096, 6000)),
        (CPU, None, 4096, (128, 4096)),
        (CPU, None, 127, (128,)),
    ],
)
def test_the_length_at_hand_is_measured_unless_it_is_short(
    device: torch.device, most: int | None, length: int | None, expected: tuple[int, ...]
) -> None:
    assert Effort.of(device, most, length).mode_lengths(device, 2) == expected


def test_long_passes_are_repeated_less_and_no_length_takes_long() -> None:
    assert Steps.of(0.1) == (None, 6) and Steps.of(0.3) == (2, 3)
    cluster = Cluster("one", 1, 2, Mesh(300.0))

    def measured(length: int) -> tuple[int, float, float]:
        """Modes that are measured, what the fastest takes, and what all steps do."""
        ranking = rank_modes(Problem(2, length, GQA), cluster, COSTS)
        chosen = worth_measuring(ranking)
        assert chosen == ranking[: len(chosen)]
        return len(chosen), ranking[0].seconds, sum(Steps.of(c.seconds).total_seconds(c.seconds) for c in chosen)

    most = measured(32768)[0]
    for length, every, none in ((131072, True, False), (180000, False, False), (300000, False, True)):
        count, fastest, total = measured(length)
        assert total <= 20.0
        assert (count == most) is every and (count == 0) is none and (fastest > 1.0) is none
    assert worth_measuring([]) == []


def _samples(rank: int) -> tuple[ModeSample, ...]:
    group = dist.group.WORLD
    assert group is not None
    cluster, n = Cluster("one", 1, group.size(), Mesh(10.0)), group.size()
    costs = Costs(0.01, 0.01)
    long = 64 * n
    while rank_modes(Problem(n, long, SMALL), cluster, costs)[0].seconds <= 1.0:
        long *= 2
    lengths = (16 * n, 16 * n + 5, long)
    return Modes(group, CPU, SMALL, torch.float32, ("cpu", "p2p")).samples(cluster, costs, lengths)


@pytest.mark.parametrize("n", [2, 3])
def test_passes_of_any_length_are_measured_unless_they_take_too_long(n: int) -> None:
    first, *others = run_distributed(_samples, n)
    assert all(other == first for other in others)
    assert {sample.length for sample in first} == {16 * n, 16 * n + 5}
    both = {(sample.mode, sample.length) for sample in first if not sample.backward}
    assert both == {(sample.mode, sample.length) for sample in first if sample.backward}
    assert len(first) == 2 * len(both) and all(sample.ratio > 0 for sample in first)


def test_many_short_calls_and_few_long_ones_load_a_gpu() -> None:
    assert [num_loading_calls(seconds) for seconds in (0.0, 1e-5, 1e-3, 0.03, 0.5)] == [1000, 1000, 100, 4, 1]


def test_cpus_are_not_loaded() -> None:
    calls: list[int] = []
    put_under_load(lambda: calls.append(0), CPU)
    assert len(calls) == 2
    assert sustained_seconds(lambda: calls.append(1), CPU, 3) > 0 and calls.count(1) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpus_are_under_load_when_calls_are_timed() -> None:
    x, calls = torch.randn(1024, 1024, device="cuda"), []

    def work() -> None:
        calls.append(torch.mm(x, x).ndim)

    assert sustained_seconds(work, torch.device("cuda"), 3) > 0
    assert 2 + 3 < len(calls) <= 1001 + 3
