"""Simulated times against times worked out by hand, and what has to hold for every mode."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_longctx.schedules import SCHEDULES, Costs, Kind, PlanOptions, Workload, build_plan, seal, transpose
from megatron_longctx.schedules.cost import GIB
from megatron_longctx.schedules.simulate import peak_bytes, simulate
from megatron_longctx.topology import Cluster, Device, Mesh, Network, Switch, load_cluster

TOKENS = 1024
WORK = Workload(num_heads=4, num_kv_heads=4, head_dim=64, element_bytes=4)
BLOCK_BYTES = TOKENS * 2 * 4 * 64 * 4  # keys and values of one rank
BLOCK_FLOPS = 4 * TOKENS**2 * 4 * 64  # one rank's queries with one rank's keys


def costs(block_s: float) -> Costs:
    """A full block takes `block_s` forward; nothing else takes time."""
    rate = BLOCK_FLOPS / block_s / 1e12
    return Costs(rate, rate, call_s=0.0, merge_gibps=1e12, step_s=0.0, message_s=0.0)


def mesh(n: int, block_s: float, latency_s: float = 0.0) -> Cluster:
    """A block takes `block_s` on every link."""
    return Cluster("mesh", 1, n, Mesh(BLOCK_BYTES / GIB / block_s, latency_s))


@pytest.mark.parametrize(("compute", "transfer"), [(3.0, 2.0), (2.0, 3.0)])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_ring_takes_the_longer_of_computing_and_sending_each_step(n: int, compute: float, transfer: float) -> None:
    plan = build_plan("ring", n, n * TOKENS, causal=False)
    found = simulate(plan, mesh(n, transfer), WORK, costs(compute))
    assert found.seconds == pytest.approx((n - 1) * max(compute, transfer) + compute, rel=1e-6)
    assert found.compute_s == pytest.approx([n * compute] * n, rel=1e-6)
    assert found.exposed_s == pytest.approx([(n - 1) * max(0.0, transfer - compute)] * n, abs=1e-6)


def test_latency_and_the_start_of_messages_are_waited_for() -> None:
    plan = build_plan("ring", 2, 2 * TOKENS, causal=False)
    slow = replace(costs(1.0), step_s=0.25, message_s=0.125)
    found = simulate(plan, mesh(2, 2.0, latency_s=0.5), WORK, slow)
    assert found.seconds == pytest.approx(2.0 + 0.5 + 0.25 + 2 * 0.125 + 1.0)  # a message out and one in


def test_causal_ring_leaves_the_first_rank_idle() -> None:
    plan = build_plan("ring", 2, 2 * TOKENS)
    found = simulate(plan, mesh(2, 1e-3), WORK, costs(2.0))
    half = 2.0 * (TOKENS + 1) / (2 * TOKENS)  # the diagonal block
    assert found.compute_s == pytest.approx([half, half + 2.0], rel=1e-6)
    assert found.idle_s == pytest.approx([2.0, 0.0], abs=1e-6)
    assert found.idle_share == pytest.approx(2.0 / (2 * (half + 2.0)), rel=1e-6)


def test_messages_of_a_step_share_the_link_they_pass() -> None:
    plan = build_plan("ring", 4, 4 * TOKENS, causal=False)
    rate = BLOCK_BYTES / GIB  # a block a second
    wired = {
        "each its own link": (mesh(4, 1.0), 1.0),
        "a port each": (Cluster("switch", 1, 4, Switch(rate, rate)), 1.0),
        "one message at a time through the only NIC": (Cluster("two", 2, 2, Mesh(1e6), Network(1, rate)), 1.0),
        "a NIC of half the rate": (Cluster("two", 2, 2, Mesh(1e6), Network(1, rate / 2)), 2.0),
    }
    for name, (cluster, seconds) in wired.items():
        assert simulate(plan, cluster, WORK, costs(1e-6)).seconds == pytest.approx(3 * seconds, rel=1e-3), name
    gathered = build_plan("all_gather", 4, 4 * TOKENS, causal=False)
    assert simulate(gathered, mesh(4, 1.0), WORK, costs(1e-6)).seconds == pytest.approx(1.0, rel=1e-3)
    switch = Cluster("switch", 1, 4, Switch(rate, rate))
    assert simulate(gathered, switch, WORK, costs(1e-6)).seconds == pytest.approx(3.0, rel=1e-3)
    one_nic = Cluster("two", 2, 2, Mesh(1e6), Network(1, rate))  # 2 ranks x 2 blocks into each node
    assert simulate(gathered, one_nic, WORK, costs(1e-6)).seconds == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize("n", [3, 5, 8])
def test_on_a_full_mesh_tasp_is_as_many_times_faster_as_it_has_rings(n: int) -> None:
    length = 2 * n * (n - 1) * 64
    slow, fast = (build_plan(mode, n, length, causal=False) for mode in ("zigzag", "tasp"))
    times = [simulate(plan, mesh(n, 1.0), WORK, costs(1e-9)).seconds for plan in (slow, fast)]
    assert times[0] / times[1] == pytest.approx(n - 1, rel=1e-3)


def test_links_are_busy_for_the_share_of_time_that_they_carry() -> None:
    plan = build_plan("ring", 3, 3 * TOKENS, causal=False)
    found = simulate(plan, mesh(3, 1.0), WORK, costs(3.0))
    assert {str(link) for link in found.links} == {"link 0.1", "link 1.2", "link 2.0"}
    assert list(found.links.values()) == pytest.approx([2 / 9] * 3, rel=1e-6)
    assert found.busiest_link is not None and found.busiest_link[1] == pytest.approx(2 / 9, rel=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backward", [False, True])
def test_time_lines_add_up(schedule: str, backward: bool) -> None:
    n = 4
    plan = build_plan(schedule, n, n * TOKENS + 3)
    plan = seal(transpose(plan)) if backward else plan
    cluster = load_cluster("h200_x8").resized(n)
    found = simulate(plan, cluster, WORK, timeline=True)
    assert found.seconds > 0 and found.spans
    for rank in range(n):
        computing = [span for span in found.spans if span.rank == rank and span.lane == "compute"]
        assert sum(span.stop - span.start for span in computing) == pytest.approx(found.compute_s[rank])
        assert all(a.stop <= b.start + 1e-12 for a, b in itertools.pairwise(computing))
        total = found.compute_s[rank] + found.exposed_s[rank] + found.idle_s[rank]
        assert total == pytest.approx(found.seconds)
    quiet = simulate(plan, cluster, WORK)
    assert quiet.seconds == found.seconds and not quiet.spans
    assert found.peak_bytes == peak_bytes(plan, WORK)


def test_memory_is_what_a_pass_holds() -> None:
    plan = build_plan("ring", 2, 2 * TOKENS)
    q = TOKENS * 4 * 64 * 4  # of a rank; k and v as many each
    lse = TOKENS * 4 * 4
    # q, k and v, k and v packed, out with its LSE, the sum of out; one remote block of keys and values
    assert peak_bytes(plan, WORK) == q + 2 * q + 2 * q + (q + lse) + q + 2 * q
    bounded, free = (build_plan("all_gather", 8, 8 * TOKENS, options=PlanOptions(k)) for k in (2 * TOKENS, None))
    assert peak_bytes(bounded, WORK) < peak_bytes(free, WORK)


def test_memory_of_a_plan_does_not_depend_on_more_ranks_for_a_ring() -> None:
    sizes = {peak_bytes(build_plan("zigzag", n, n * TOKENS), WORK) for n in (3, 4, 8)}
    assert len(sizes) == 1


def test_measured_kernels_and_messages_count_where_there_are_any() -> None:
    from megatron_longctx.schedules.cost import KernelSample, MessageSample

    plan = build_plan("ring", 2, 2 * TOKENS, causal=False)
    measured = replace(
        costs(1.0),
        kernels=(KernelSample(TOKENS, TOKENS, False, False, 1, 7.0),),
        messages=(MessageSample(1, 1, 11.0), MessageSample(BLOCK_BYTES, 1, 11.0)),
    )
    assert simulate(plan, mesh(2, 1.0), WORK, measured).seconds == pytest.approx(11.0 + 7.0)


def test_a_cluster_that_is_too_small_or_says_nothing_is_refused() -> None:
    plan = build_plan("ring", 4, 64)
    with pytest.raises(ValueError, match=r"mesh of 2 ranks: expected 4 or more"):
        simulate(plan, mesh(2, 1.0), WORK, costs(1.0))
    with pytest.raises(ValueError, match="peak_tflops and efficiency"):
        simulate(plan, mesh(4, 1.0), WORK)
    with pytest.raises(ValueError, match="forward_tflops=0"):
        Costs(0.0, 1.0)
    with pytest.raises(ValueError, match="num_heads=0"):
        Workload(0, 1, 64)


def test_costs_of_a_device_are_its_data_sheet() -> None:
    found = Costs.of_device(Device("x", peak_tflops=1000.0, efficiency=0.5))
    assert (found.forward_tflops, found.backward_tflops) == (500.0, 435.0)


@pytest.mark.parametrize("n", [128])
def test_many_ranks_are_simulated(n: int) -> None:
    cluster = load_cluster("dgx_h100_x4").resized(8)
    cluster = replace(cluster, nodes=n // 8)
    work = Workload(32, 8, 128)
    ring, double = (
        simulate(build_plan(mode, n, n * 4096, options=PlanOptions(inner_size=8)), cluster, work).seconds
        for mode in ("zigzag", "double_ring")
    )
    assert 0 < double <= ring * 1.01


def test_bytes_of_a_token_are_those_that_travel() -> None:
    gqa = Workload(8, 2, 16, batch=3, element_bytes=2)
    assert gqa.token_bytes(Kind.KV) == 3 * 2 * 2 * 16 * 2
    assert gqa.token_bytes(Kind.Q) == 3 * 8 * 16 * 2
    assert gqa.token_bytes(Kind.OUT) == 3 * 8 * (16 * 2 + 4)  # with an fp32 LSE
