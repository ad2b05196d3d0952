"""Simulated times against times calculated by hand, and properties of every mode."""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.config.cluster import Cluster, Device, Mesh, Network, Switch, load_cluster
from megatron_longctx.core.plans import (
    ALL_HEADS,
    MODES,
    Heads,
    KernelCall,
    KernelSupport,
    Kind,
    Segment,
    Target,
    Workload,
    backward_plan,
    build_plan,
    kernel_calls,
    record,
)
from megatron_longctx.core.plans.mask import causal, documents, full
from megatron_longctx.core.plans.recorder import Recorder
from megatron_longctx.core.plans.recording import Recording
from megatron_longctx.core.plans.visibility import Visibility
from megatron_longctx.planner.cost import GIB, Costs, KernelSample, MessageSample, attention_flops
from megatron_longctx.planner.footprint import footprint
from megatron_longctx.planner.simulate import simulate

RESULTS = Path(__file__).resolve().parents[2] / "analysis" / "results"
TOKENS = 1024
WORK = Workload(num_heads=4, num_kv_heads=4, head_dim=64, element_bytes=4)
BLOCK_BYTES = TOKENS * 2 * 4 * 64 * 4  # keys and values of one rank
BLOCK_FLOPS = 4 * TOKENS**2 * 4 * 64  # one rank's queries with one rank's keys


def costs(block_s: float) -> Costs:
    """Return costs by which a full block takes `block_s` in forward, and nothing else takes time."""
    rate = BLOCK_FLOPS / block_s / 1e12
    return Costs(rate, rate, call_s=0.0, merge_gibps=1e12, step_s=0.0, message_s=0.0)


def mesh(n: int, block_s: float, latency_s: float = 0.0) -> Cluster:
    """Return a cluster on whose links a block takes `block_s`."""
    return Cluster("mesh", 1, n, Mesh(BLOCK_BYTES / GIB / block_s, latency_s))


@pytest.mark.parametrize(("compute", "transfer"), [(3.0, 2.0), (2.0, 3.0)])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_step_of_a_ring_takes_the_longer_of_compute_and_transfer(n: int, compute: float, transfer: float) -> None:
    plan = build_plan("ring", n, full(n * TOKENS))
    found = simulate(plan, mesh(n, transfer), WORK, costs(compute))
    assert found.seconds == pytest.approx((n - 1) * max(compute, transfer) + compute, rel=1e-6)
    assert found.compute_s == pytest.approx([n * compute] * n, rel=1e-6)
    assert found.exposed_s == pytest.approx([(n - 1) * max(0.0, transfer - compute)] * n, abs=1e-6)


def test_latency_and_overhead_of_messages_count() -> None:
    plan = build_plan("ring", 2, full(2 * TOKENS))
    slow = replace(costs(1.0), step_s=0.25, message_s=0.125)
    found = simulate(plan, mesh(2, 2.0, latency_s=0.5), WORK, slow)
    assert found.seconds == pytest.approx(2.0 + 0.5 + 0.25 + 2 * 0.125 + 1.0)  # one message out and one in


def test_causal_ring_leaves_the_first_rank_idle() -> None:
    plan = build_plan("ring", 2, 2 * TOKENS)
    found = simulate(plan, mesh(2, 1e-3), WORK, costs(2.0))
    half = 2.0 * (TOKENS + 1) / (2 * TOKENS)  # the diagonal block
    assert found.compute_s == pytest.approx([half, half + 2.0], rel=1e-6)
    busy = [compute + exposed for compute, exposed in zip(found.compute_s, found.exposed_s, strict=True)]
    assert busy == pytest.approx([found.seconds - 2.0, found.seconds], abs=1e-6)
    assert found.idle_share == pytest.approx(2.0 / (2 * (half + 2.0)), rel=1e-6)


def test_messages_of_a_step_share_links() -> None:
    plan = build_plan("ring", 4, full(4 * TOKENS))
    rate = BLOCK_BYTES / GIB  # a block a second
    wired = {
        "each its own link": (mesh(4, 1.0), 1.0),
        "a port each": (Cluster("switch", 1, 4, Switch(rate, rate)), 1.0),
        "one message at a time through the only NIC": (Cluster("two", 2, 2, Mesh(1e6), Network(1, rate)), 1.0),
        "a NIC of half the rate": (Cluster("two", 2, 2, Mesh(1e6), Network(1, rate / 2)), 2.0),
    }
    for name, (cluster, seconds) in wired.items():
        assert simulate(plan, cluster, WORK, costs(1e-6)).seconds == pytest.approx(3 * seconds, rel=1e-3), name
    gathered = build_plan("all_gather", 4, full(4 * TOKENS))
    assert simulate(gathered, mesh(4, 1.0), WORK, costs(1e-6)).seconds == pytest.approx(1.0, rel=1e-3)
    switch = Cluster("switch", 1, 4, Switch(rate, rate))
    assert simulate(gathered, switch, WORK, costs(1e-6)).seconds == pytest.approx(3.0, rel=1e-3)
    one_nic = Cluster("two", 2, 2, Mesh(1e6), Network(1, rate))  # 2 ranks x 2 blocks into each node
    assert simulate(gathered, one_nic, WORK, costs(1e-6)).seconds == pytest.approx(4.0, rel=1e-3)


def test_links_report_the_share_of_time_in_which_they_are_busy() -> None:
    plan = build_plan("ring", 3, full(3 * TOKENS))
    found = simulate(plan, mesh(3, 1.0), WORK, costs(3.0))
    assert {str(link) for link in found.links} == {"link 0.1", "link 1.2", "link 2.0"}
    assert list(found.links.values()) == pytest.approx([2 / 9] * 3, rel=1e-6)
    assert found.busiest_link is not None and found.busiest_link[1] == pytest.approx(2 / 9, rel=1e-6)


@pytest.mark.parametrize("schedule", MODES)
@pytest.mark.parametrize("backward", [False, True])
def test_timelines_add_up(schedule: str, backward: bool) -> None:
    n = 4
    plan = build_plan(schedule, n, n * TOKENS + 3)
    plan = backward_plan(plan) if backward else plan
    cluster = load_cluster("h200_x8").resized(n)
    found = simulate(plan, cluster, WORK, timeline=True)
    assert found.seconds > 0 and found.spans
    for rank in range(n):
        computing = [span for span in found.spans if span.rank == rank and span.lane == "compute"]
        assert sum(span.stop - span.start for span in computing) == pytest.approx(found.compute_s[rank])
        assert all(a.stop <= b.start + 1e-12 for a, b in itertools.pairwise(computing))
        assert found.compute_s[rank] + found.exposed_s[rank] <= found.seconds * (1 + 1e-12)
    quiet = simulate(plan, cluster, WORK)
    assert quiet.seconds == pytest.approx(found.seconds, rel=1e-12) and not quiet.spans
    target = Target(WORK)
    assert found.peak_bytes == max(footprint(record(plan, rank, target), WORK).total for rank in range(n))


def test_messages_slow_down_kernel_calls_beside_them() -> None:
    """A call of 3 s takes half of the 2 s longer that a message beside it takes."""
    plan = build_plan("ring", 2, full(2 * TOKENS))
    slowed = simulate(plan, mesh(2, 2.0), WORK, replace(costs(3.0), blocking=0.5))
    assert slowed.seconds == pytest.approx(3.0 + 0.5 * 2.0 + 3.0)


def test_measured_kernels_and_messages_replace_rates() -> None:
    plan = build_plan("ring", 2, full(2 * TOKENS))
    measured = replace(
        costs(1.0),
        kernels=(KernelSample(TOKENS, TOKENS, False, False, 1, 7.0),),
        messages=(MessageSample(1, 1, 11.0), MessageSample(BLOCK_BYTES, 1, 11.0)),
    )
    assert simulate(plan, mesh(2, 1.0), WORK, measured).seconds == pytest.approx(11.0 + 7.0)


def test_too_small_clusters_and_missing_figures_are_refused() -> None:
    plan = build_plan("ring", 4, 64)
    with pytest.raises(ValueError, match=r"mesh of 2 ranks: expected 4 or more"):
        simulate(plan, mesh(2, 1.0), WORK, costs(1.0))
    with pytest.raises(ValueError, match="peak_tflops and efficiency"):
        simulate(plan, mesh(4, 1.0), WORK)
    with pytest.raises(ValueError, match="forward_tflops=0"):
        Costs(0.0, 1.0)
    with pytest.raises(ValueError, match="num_heads=0"):
        Workload(0, 1, 64)


def test_kernel_calls_take_the_time_of_the_tiles_that_they_touch() -> None:
    """Several segments and windows have the rate of a long call; a causal rectangle is a rectangle and a square."""
    priced = Costs(1.0, 0.5, call_s=0.0)
    tile, one = 128, Workload(1, 1, 64)

    def pairs(call: KernelCall, backward: bool = False) -> float:
        tflops = priced.backward_tflops if backward else priced.forward_tflops
        return (
            priced.call_seconds(call, ALL_HEADS, one, backward)
            * tflops
            * 1e12
            / attention_flops(one, 1, ALL_HEADS, backward)
        )

    packed = KernelSupport(packed=True, rectangles=True, windows=True)
    (whole,), (pack,), (window,) = (
        kernel_calls(mask.slices, packed)
        for mask in (causal(4096), documents([1024, 3072]), documents([4096], window=(256, 0)))
    )
    assert pairs(whole) == pytest.approx(causal(4096).pairs) == pairs(whole, True)
    edges = 3 * 4096  # of queries, keys and a bound, each of which adds half a tile
    assert pairs(pack) == pytest.approx(pack.pairs + tile / 2 * edges)
    assert pairs(window) == pytest.approx(window.pairs + tile / 2 * (edges + 4096))
    assert pairs(window) < pairs(pack) < pairs(whole)
    rectangle = KernelCall((Segment(0, 1024, 0, 4096),), right=0)
    assert pairs(rectangle) == pytest.approx(rectangle.pairs)
    # Measured calls replace the rates.
    samples = (KernelSample(64, 64, True, False, 1, 1e-3), KernelSample(4096, 4096, True, False, 1, 2.0))
    measured = replace(priced, kernels=samples)
    share = measured.call_seconds(window, ALL_HEADS, one, False) / 2.0
    assert share == pytest.approx(pairs(window) / causal(4096).pairs)


def test_costs_of_a_device_are_its_data_sheet() -> None:
    one = Cluster("x", 1, 1, device=Device("x", peak_tflops=1000.0, efficiency=0.5))
    found = Costs.of_cluster(one)
    assert (found.forward_tflops, found.backward_tflops) == (500.0, 435.0)
    assert Costs.of_cluster(replace(one, device=replace(one.device, memory_gibps=77.0))).merge_gibps == 77.0


def test_described_messages_are_timed_by_their_size() -> None:
    sheet = Device("x", peak_tflops=1e6, efficiency=0.5)
    timed = Mesh(1.0, messages=((BLOCK_BYTES // 2, 1, 2.0), (2 * BLOCK_BYTES, 1, 5.0), (BLOCK_BYTES, 3, 9.0)))
    cluster = Cluster("mesh", 1, 4, timed, device=sheet)
    assert simulate(build_plan("ring", 4, full(4 * TOKENS)), cluster, WORK).seconds == pytest.approx(3 * 3.0, rel=1e-3)
    gathered = build_plan("all_gather", 4, full(4 * TOKENS))
    assert simulate(gathered, cluster, WORK).seconds == pytest.approx(9.0, rel=1e-3)


RECORDED = [
    each
    for each in json.loads((RESULTS / "attention_peers_h200_x4.json").read_text())["measurements"]
    if each["name"] in ("zigzag", "all_gather", "ulysses") and each["length"] >= 32768 and each["forward_s"]
]


def test_recorded_passes_are_simulated_within_a_tenth() -> None:
    """From 32K tokens on, by the description of H200s over peer memory. Shorter passes also wait for their host."""
    cluster = load_cluster("h200_x8_pull").resized(4)
    assert len(RECORDED) >= 18
    for each in RECORDED:
        target = Target(Workload(*map(int, each["heads"].split(":")), 128), over_peers=True)
        plan = build_plan(each["name"], 4, each["length"], keep_received=None)
        found = sum(simulate(one, cluster, target).seconds for one in (plan, backward_plan(plan)))
        assert found == pytest.approx(each["forward_s"] + each["backward_s"], rel=0.1), each["name"]


def test_a_thousand_ranks_are_planned_and_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a window shows is looked up near it, not on all ranks."""
    n, looked, holding = 1024, [0], Visibility._holding

    def counted(*of: Any) -> Any:
        for each in holding(*of):
            looked[0] += 1
            yield each

    monkeypatch.setattr(Visibility, "_holding", counted)
    cluster = replace(load_cluster("dgx_h100_x4").resized(8), nodes=n // 8)
    target = Target(Workload(8, 8, 64), KernelSupport(packed=True, rectangles=True, windows=True))
    plan = build_plan("all_gather", n, documents([2 * n], window=(4, 0)))
    assert n < looked[0] < 16 * n
    for each in (plan, backward_plan(plan)):
        found = simulate(each, cluster, target)
        assert found.seconds > 0 and min(found.compute_s) > 0


def test_long_simulations_say_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = build_plan("ring", 4, 64)
    with caplog.at_level("INFO"):
        simulate(plan, mesh(4, 1.0), WORK, costs(1.0))
        assert not caplog.messages
        monkeypatch.setattr("megatron_longctx.config.progress.EVERY_S", 1e-4)
        record = Recorder.record

        def slow(recorder: Recorder, rank: int) -> Recording:
            while not any(line.startswith(f"simulating ring: {rank} of 4 ranks") for line in caplog.messages):
                time.sleep(0.001)
            return record(recorder, rank)

        monkeypatch.setattr(Recorder, "record", slow)
        simulate(plan, mesh(4, 1.0), WORK, costs(1.0))
    assert any(line.endswith(" left") for line in caplog.messages)


def test_bytes_of_a_token() -> None:
    gqa = Workload(8, 2, 16, batch=3, element_bytes=2)
    assert gqa.token_bytes(Kind.KV) == 3 * 2 * 2 * 16 * 2
    assert gqa.token_bytes(Kind.Q) == 3 * 8 * 16 * 2
    assert gqa.token_bytes(Kind.OUT) == 3 * 8 * (16 * 2 + 4)  # with an fp32 LSE
    assert gqa.field_bytes(Kind.Q_GRAD) == (*[3 * 8 * 16 * 2] * 3, 3 * 8 * 4)
    # Values with another head dim, and keys and values packed into bytes.
    mixed = Workload(8, 2, 24, v_head_dim=16, kv_row_bytes=44)
    assert [mixed.token_bytes(kind) for kind in (Kind.Q, Kind.KV, Kind.DKV, Kind.GRAD)] == [
        8 * 24 * 2, 2 * 44, 2 * (24 + 16) * 2, 8 * 16 * 2,
    ]  # fmt: skip


def test_parts_of_the_heads() -> None:
    """If there are more parts than heads, neighbouring parts share one."""
    gqa = Workload(8, 2, 16)
    assert gqa.head_range(Kind.Q, Heads(1, 4)) == range(2, 4) and gqa.head_range(Kind.KV, Heads(1, 2)) == range(1, 2)
    assert [gqa.head_range(Kind.KV, Heads(part, 8))[0] for part in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
