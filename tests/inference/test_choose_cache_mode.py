"""The choice of a mode: the simulator's predictions, the sizes of messages, and where their numbers come from."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_longctx.config import Config, workload_of
from megatron_longctx.config.cluster import Cluster, Network, load_cluster
from megatron_longctx.core.plans import Workload
from megatron_longctx.core.plans.cache_modes import CACHE_MODES
from megatron_longctx.inference import choose_cache_mode
from megatron_longctx.inference.batch import Batch
from megatron_longctx.inference.choose_cache_mode import Chooser, LinkFacts, calibration_file, find_facts
from megatron_longctx.mcore.inference import inference_config
from megatron_longctx.planner.calibration import Calibration, save_calibration
from megatron_longctx.planner.cost import Costs
from megatron_longctx.planner.simulate import simulate
from megatron_longctx.training.compose import compose_config
from tests.inference.histories import batch_with_past

CPU = torch.device("cpu")
# Llama 3 405B's heads on one of 8 tensor-parallel ranks, over 4 hosts; the paper's achieved rates.
HEADS = Workload(num_heads=16, num_kv_heads=1, head_dim=128)
HOSTS = Cluster("hosts", 4, 1, network=Network(1, 26e9 / 2**30, 1e-5))
PAPER = LinkFacts(HEADS, HOSTS, Costs(540, 540))


@pytest.mark.parametrize(
    ("heads", "taken", "threshold"), [((16, 1), "pass_kv", 0.125), ((8, 8), "pass_q", 2.0), ((32, 8), "pass_kv", 0.5)]
)
def test_without_links_the_smaller_messages_travel(heads: tuple[int, int], taken: str, threshold: float) -> None:
    decision = Chooser(LinkFacts(Workload(*heads, 64))).choose(batch_with_past(2, [(50,)], [50]))
    assert (decision.mode, decision.rule) == (taken, "bytes")
    assert decision.inputs == {"miss_rate": 0.5, "threshold": threshold}
    assert Chooser(LinkFacts(HEADS)).choose(batch_with_past(2, [(50,)], [1])).mode == "one_hop"


def test_the_simulator_passes_keys_for_a_fresh_prompt_and_queries_over_a_large_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chooser = Chooser(PAPER)
    with caplog.at_level(logging.INFO):
        fresh = chooser.choose(batch_with_past(4, [()], [32768], page=4096))
        warm = chooser.choose(batch_with_past(4, [(120000,)], [256], page=4096))
    assert fresh.mode == "pass_kv" and warm.mode in ("pass_q", "one_hop")
    for decision in (fresh, warm):
        assert set(decision.seconds) == set(CACHE_MODES)
        assert decision.seconds[decision.mode] == min(decision.seconds.values())
    assert [record.message for record in caplog.records] == [f"attention over the cache: {d}" for d in (fresh, warm)]
    assert "32768 new and 0 cached tokens of 1 sequences on 4 ranks: pass_kv by simulation (one_hop " in str(fresh)


SWITCH = load_cluster("h200_x8").resized(4)
EIGHT_B = Workload(num_heads=32, num_kv_heads=8, head_dim=128)


def operations(batch: Batch, mode: str) -> int:
    return simulate(batch.plan(mode), SWITCH, EIGHT_B, Costs(600, 520)).operations


@pytest.mark.parametrize(
    ("cached", "new", "operation_s", "taken"),
    [
        (2000, 66, 0.0, "one_hop"),  # without host time, two exchanges rather than three
        (131006, 66, 1.5e-4, "one_hop"),  # 9 operations, pass_kv 10
        (131006, 66, 1e-3, "one_hop"),
        (0, 32768, 1.5e-4, "pass_kv"),  # the device takes longer than any host
    ],
)
def test_the_hosts_time_counts_for_short_prompts(cached: int, new: int, operation_s: float, taken: str) -> None:
    facts = LinkFacts(EIGHT_B, SWITCH, Costs(600, 520, host_operation_s=operation_s))
    batch = batch_with_past(4, [(cached,)] if cached else [()], [new], page=64, pages=2 + (cached + new) // 200)
    decision = Chooser(facts).choose(batch)
    assert decision.mode == taken
    least = {mode: operation_s * operations(batch, mode) for mode in CACHE_MODES}
    assert all(decision.seconds[mode] >= least[mode] for mode in CACHE_MODES)


def test_communication_behind_a_slow_host_counts_in_part() -> None:
    """Over a long cache, sending keys takes longer than the rest of the layer, but the host takes longer still."""
    batch = batch_with_past(4, [(131006,)], [66], page=64, pages=520, max_contiguous=0)

    def seconds(operation_s: float) -> dict[str, float]:
        facts = LinkFacts(EIGHT_B, SWITCH, Costs(600, 520, host_operation_s=operation_s))
        return Chooser(facts).choose(batch).seconds

    device, slow = seconds(0.0), seconds(3e-4)
    issued = {mode: operations(batch, mode) for mode in CACHE_MODES}
    for mode in ("pass_q", "one_hop"):
        later = device["pass_kv"] - device[mode]
        assert device["pass_kv"] > 2 * device[mode]
        fewer = 3e-4 * (issued[mode] - issued["pass_kv"])
        assert 0.3 * later < slow["pass_kv"] - slow[mode] + fewer < 0.5 * later


def test_decodes_of_one_size_are_decided_once() -> None:
    chooser = Chooser(PAPER)
    first = chooser.choose(batch_with_past(4, [(1000,), (900,)], [1, 1], page=64, pages=400))
    assert first is chooser.choose(batch_with_past(4, [(1001,), (901,)], [1, 1], page=64, pages=400))
    assert first is not chooser.choose(batch_with_past(4, [(9000,), (900,)], [1, 1], page=64, pages=400))
    assert first.mode == "one_hop"


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_a_forced_mode_is_taken(mode: str) -> None:
    assert Chooser(LinkFacts(HEADS), mode).choose(batch_with_past(2, [(4,)], [3])).mode == mode


def test_unknown_modes_and_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inference\.mode=ring: expected one of auto, one_hop"):
        Chooser(PAPER, "ring")
    with pytest.raises(ValueError, match="peak_tflops and efficiency"):
        Chooser(LinkFacts(HEADS, HOSTS))
    assert Chooser(LinkFacts(HEADS, HOSTS), "pass_q").mode == "pass_q"


def test_a_mode_that_is_forced_in_a_context_has_no_effect_outside() -> None:
    chooser, batch = Chooser(LinkFacts(HEADS)), batch_with_past(4, [(400,)], [1])
    assert chooser.candidates == tuple(CACHE_MODES) and Chooser(PAPER, mode="pass_q").candidates == ("pass_q",)
    with chooser.forcing("pass_kv"):
        assert chooser.choose(batch).mode == "pass_kv"
    assert chooser.choose(batch).mode == "one_hop"
    with chooser.forcing("pass_q"):
        assert chooser.choose(batch).mode == "pass_q", "also if a batch like it was decided before"
    assert chooser.choose(batch).mode == "one_hop" and chooser.mode == "auto"


def config_of(*words: str) -> Config:
    return compose_config(["parallelism=cp2", "train.device=cpu", *words])


def calibrated(config: Config, folder: Path, gibps: float, batch: int = 1) -> None:
    """Save a calibration of `config` whose links have `gibps`."""
    cluster = Cluster("measured", 2, 1, network=Network(1, gibps, 1e-5))
    workload = replace(workload_of(config), batch=batch)
    found = Calibration("cpu", "cpu", "p2p", cluster, workload, Costs(0.5, 0.5))
    save_calibration(found, calibration_file(config, CPU, folder))


def test_a_calibration_comes_before_the_cluster(tmp_path: Path) -> None:
    config = config_of("parallelism.cluster=tcp")
    named = find_facts(config, CPU, tmp_path)
    assert named.cluster is not None and named.cluster.name != "measured" and named.costs is None
    calibrated(config, tmp_path, 3.0)
    found = find_facts(config, CPU, tmp_path)
    assert found.cluster is not None and found.cluster.name == "measured"
    assert found.costs is not None and found.costs.forward_tflops == 0.5
    assert found.cluster.route(0, 1).gibps == 3
    decision = Chooser(found).choose(batch_with_past(2, [(40,)], [8]))
    assert decision.rule == "simulation" and decision.seconds


def test_calibrations_of_batches_are_not_used(tmp_path: Path) -> None:
    config = config_of()
    calibrated(config, tmp_path, 3.0, batch=2)
    assert find_facts(config, CPU, tmp_path).cluster is None


def test_one_rank_and_unknown_links(tmp_path: Path) -> None:
    calibrated(config_of(), tmp_path, 3.0)
    alone = find_facts(config_of("parallelism.context_parallel_size=1"), CPU, tmp_path)
    assert alone.cluster is None
    other_heads = find_facts(config_of("model.num_kv_heads=4"), CPU, tmp_path)
    assert other_heads.cluster is None


def test_a_broken_calibration_is_refused(tmp_path: Path) -> None:
    config = config_of()
    path = calibration_file(config, CPU, tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected a calibration"):
        find_facts(config, CPU, tmp_path)


def test_the_calibration_is_that_of_the_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over_peers, either = config_of("inference.transport=peer"), config_of("inference.transport=auto")
    calibrated(config_of(), tmp_path, 3.0)
    assert find_facts(over_peers, CPU, tmp_path).costs is None
    assert calibration_file(over_peers, CPU, tmp_path) != calibration_file(config_of(), CPU, tmp_path)
    assert calibration_file(either, CPU, tmp_path) == calibration_file(config_of(), CPU, tmp_path)
    gpu = torch.device("cuda")
    monkeypatch.setattr(choose_cache_mode, "environment", lambda: {"device": "NVIDIA H200"})
    calibration_file(config_of(), gpu, tmp_path).touch()
    assert calibration_file(either, gpu, tmp_path) == calibration_file(config_of(), gpu, tmp_path)  # the only one
    nothing = tmp_path / "nothing"
    assert calibration_file(either, gpu, nothing) == calibration_file(over_peers, gpu, nothing)


def test_peer_memory_is_refused_on_cpus_before_ranks_start() -> None:
    with pytest.raises(ValueError, match=r"inference\.transport=peer: expected auto or p2p on CPUs"):
        inference_config(config_of("inference.transport=peer"))
    assert inference_config(config_of("inference.transport=auto")).inference.transport == "auto"
