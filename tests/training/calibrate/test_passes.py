"""Whole passes: the lengths and modes of measured steps, and warming up before measuring."""

import pytest
import torch

from megatron_longctx.config.cluster import Cluster, Mesh
from megatron_longctx.core.comm import choose_transport
from megatron_longctx.core.plans import MODES, Target, Workload
from megatron_longctx.core.plans.mask import causal
from megatron_longctx.planner.choose_mode import Problem, rank_modes
from megatron_longctx.planner.cost import Costs, ModeSample
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.calibration import mode_samples, modes_to_measure
from megatron_longctx.training.measure import Effort, Testbed, num_warm_up_calls, sustained_seconds, warm_up
from megatron_longctx.training.ranks import world_group

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
def test_the_configured_length_is_measured_unless_it_is_short(
    device: torch.device, most: int | None, length: int | None, expected: tuple[int, ...]
) -> None:
    assert Effort.of(device, most, length).mode_lengths(device, 2) == expected


def test_candidates_are_all_modes_with_the_options_of_auto() -> None:
    ranking = rank_modes(Problem(4, causal(4096), Target(GQA)), Cluster("one", 1, 4, Mesh(300.0)), COSTS)
    assert {each.mode.name for each in ranking if each.mode} == {*MODES} - {"node_gather"}, "on one node"
    assert {"ulysses", "usp (inner_size=2)"} <= {each.name for each in ranking}
    assert len({each.name for each in ranking}) == len(ranking)


def test_no_length_takes_long() -> None:
    cluster = Cluster("one", 1, 2, Mesh(300.0))

    def measured(length: int) -> tuple[int, float]:
        """Return the number of measured modes, and the seconds of 10 steps of each."""
        ranking = rank_modes(Problem(2, causal(length), Target(GQA)), cluster, COSTS)
        chosen = modes_to_measure(ranking)
        assert chosen == ranking[: len(chosen)]
        return len(chosen), 10 * sum(each.seconds for each in chosen)

    most = measured(32768)[0]
    for length, every, none in ((65536, True, False), (180000, False, False), (400000, False, True)):
        count, total = measured(length)
        assert total <= 1.3 * 20.0
        assert (count == most) is every and (count == 0) is none
    assert modes_to_measure([]) == []


def _samples(rank: int) -> tuple[ModeSample, ...]:
    group = world_group()
    n, costs = group.size(), Costs(0.01, 0.01)
    testbed = Testbed(group, CPU, SMALL, "cpu", choose_transport("p2p", group, CPU))
    cluster, target = Cluster("one", 1, n, Mesh(10.0)), Target(SMALL, testbed.choose_kernel().takes)
    long = 64 * n
    while rank_modes(Problem(n, causal(long), target), cluster, costs)[0].seconds <= 2.0:
        long *= 2
    return mode_samples(testbed, cluster, costs, (16 * n, 16 * n + 5, long))


def test_steps_of_any_length_are_measured_unless_they_take_too_long() -> None:
    first, *others = run_distributed(_samples, n := 3)
    assert all(other == first for other in others)
    assert {sample.length for sample in first} == {16 * n, 16 * n + 5}
    both = {(sample.mode, sample.length): sample.ratio for sample in first if not sample.backward}
    assert both == {(sample.mode, sample.length): sample.ratio for sample in first if sample.backward}
    assert len(first) == 2 * len(both) and all(sample.ratio > 0 for sample in first)


def test_many_short_calls_or_few_long_ones_warm_a_gpu_up() -> None:
    assert [num_warm_up_calls(seconds) for seconds in (0.0, 1e-5, 1e-3, 0.03, 0.5)] == [1000, 1000, 100, 4, 1]


def test_cpus_need_no_warm_up() -> None:
    calls: list[int] = []
    warm_up(lambda: calls.append(0), CPU)
    assert len(calls) == 2
    assert sustained_seconds(lambda: calls.append(1), CPU, 3) > 0 and 2 + 3 <= calls.count(1) <= 2 + 300


@pytest.mark.gpu
def test_gpus_are_warm_when_calls_are_timed() -> None:
    x, calls = torch.randn(1024, 1024, device="cuda"), []

    def work() -> None:
        calls.append(torch.mm(x, x).ndim)

    assert sustained_seconds(work, torch.device("cuda"), 3) > 0
    assert 2 + 3 < len(calls) <= 1001 + 300
