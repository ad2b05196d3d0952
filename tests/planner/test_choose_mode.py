"""The choice of a mode depends on the cluster and the memory bound, and reports why a mode cannot run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.config.cluster import Cluster, Mesh, Network, load_cluster
from megatron_longctx.core.plans import (
    ALL_HEADS,
    MODES,
    KernelCall,
    Mask,
    ModeOptions,
    Segment,
    Target,
    Workload,
    find_mode,
)
from megatron_longctx.core.plans.mask import causal, documents, full
from megatron_longctx.core.plans.modes import SearchContext
from megatron_longctx.core.plans.modes.node_gather import NodeGather
from megatron_longctx.planner.calibration import Calibration, calibration_path, load_calibration, save_calibration
from megatron_longctx.planner.choose_mode import Candidate, Problem, choose_mode, rank_modes, table
from megatron_longctx.planner.cost import Costs, KernelSample, MessageSample, ModeSample

GQA = Workload(32, 8, 128)
FAST = Costs(600.0, 500.0)


def problem_of(n: int, mask: Mask | int, work: Workload = GQA, **others: Any) -> Problem:
    return Problem(n, causal(mask) if isinstance(mask, int) else mask, Target(work), **others)


def names(ranking: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in ranking if not candidate.reason]


def test_a_slow_mesh_favours_modes_that_use_all_links() -> None:
    slow = Cluster("mesh", 1, 8, Mesh(0.5))
    ranking = rank_modes(problem_of(8, 8 * 7 * 64, Workload(32, 32, 128)), slow, FAST)
    assert ranking[0].name.split()[0] in ("all_gather", "tasp", "ulysses", "usp")
    by_name = {candidate.name: candidate.seconds for candidate in ranking}
    assert by_name["tasp"] < by_name["zigzag"] / 3
    seconds = [candidate.seconds for candidate in ranking]
    assert seconds == sorted(seconds)


def test_slow_links_between_nodes_favour_a_hierarchy() -> None:
    nodes = Cluster("two", 2, 4, Mesh(100.0), Network(1, 1.0))
    ranking = rank_modes(problem_of(8, full(8 * 2048)), nodes, FAST)
    by_name = {candidate.name: candidate for candidate in ranking}
    forward = {name: candidate.forward.seconds for name, candidate in by_name.items() if candidate.forward}
    assert forward["double_ring (inner_size=4)"] < forward["zigzag"] / 1.5


@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_of_gpus_with_grouped_heads_favour_modes_that_cross_once(nodes: int) -> None:
    cluster = load_cluster("dgx_h100_x4").resized(8 * nodes)
    problem = problem_of(cluster.n, 2**15, options=ModeOptions(cluster=cluster), sum_in_node=None)
    modes = [find_mode(name, cluster.n, problem.options) for name in ("node_gather", "usp", "all_gather", "zigzag")]
    ranking = rank_modes(problem, cluster, candidates=modes)
    (found,) = (each for each in ranking if each.name.startswith("node_gather"))
    assert found.seconds < 1.03 * ranking[0].seconds and found.seconds < 0.7 * ranking[2].seconds
    assert found.predicted[0] == min(each.predicted[0] for each in ranking)
    context = SearchContext(cluster.n, 2**15, cluster)
    assert {mode.rounds for mode in NodeGather.candidates(context)} == {1, nodes - 1, 2 * nodes - 2, 8 * nodes - 8}
    assert not list(NodeGather.candidates(SearchContext(8, 2**15, load_cluster("h200_x8"))))


def test_auto_follows_the_rules_of_thumb_of_the_docs() -> None:
    """The table "Where each idea pays" of docs/schedules.md: contiguous tokens, meshes, and switches."""

    def seconds(cluster: Cluster, length: int, heads: int, layout: str = "auto") -> dict[str, float]:
        problem = problem_of(cluster.n, length, Workload(heads, heads, 128), layout=layout)
        ranking = [each for each in rank_modes(problem, cluster) if not each.reason]
        return {each.name.split()[0]: each.seconds for each in reversed(ranking)}

    four, mesh = load_cluster("h200_x8_pull").resized(4), load_cluster("mi300x_x8")
    contiguous, free = seconds(four, 2**17, 33, "contiguous"), seconds(four, 2**17, 33)
    assert min(contiguous, key=contiguous.__getitem__) == "helper" and contiguous["zigzag"] > 1.5 * contiguous["helper"]
    assert free["zigzag"] < 1.02 * free["helper"] and free["zigzag"] < free["tasp"], "a free layout, behind a switch"
    short, long = seconds(mesh, 2**15, 33), seconds(mesh, 2**17, 33)
    assert min(short, key=short.__getitem__) == "tasp" and min(long, key=long.__getitem__) == "all_gather"


def test_modes_that_cannot_run_come_last_with_a_reason() -> None:
    ranking = rank_modes(problem_of(8, 4096, Workload(4, 4, 128)), load_cluster("h200_x8"))
    assert [bool(candidate.reason) for candidate in ranking] == sorted(bool(c.reason) for c in ranking)
    (ulysses,) = (candidate for candidate in ranking if candidate.name == "ulysses")
    assert "expected a divisor of the 4 query heads" in ulysses.reason
    assert "not possible: 8 context-parallel ranks" in table(ranking)


def test_a_memory_bound_excludes_modes() -> None:
    cluster = load_cluster("h200_x8")
    free = choose_mode(problem_of(8, 2**17, GQA), cluster)
    bound = min(candidate.peak_bytes for candidate in free if not candidate.reason)
    tight = choose_mode(problem_of(8, 2**17, GQA, max_bytes=bound), cluster)
    assert all(candidate.peak_bytes <= bound for candidate in tight if not candidate.reason)
    assert any("GiB" in candidate.reason for candidate in tight)
    with pytest.raises(ValueError, match=r"schedule=auto: no mode can run 131072 tokens on 8 ranks"):
        choose_mode(problem_of(8, 2**17, GQA, max_bytes=2**20), cluster)


def test_modes_of_one_rank_and_of_a_prime_number_of_ranks() -> None:
    for n in (1, 2, 5, 7):
        cluster = Cluster("mesh", 1, n, Mesh(100.0) if n > 1 else None)
        ranking = choose_mode(problem_of(n, n * 512 + 1, Workload(n, n, 64)), cluster, FAST)
        assert "zigzag" in names(ranking) and ranking[0].seconds > 0


@pytest.fixture
def calibration() -> Calibration:
    kernels = (KernelSample(64, 64, True, False, 1, 1e-3), KernelSample(64, 128, False, True, 2, 2e-3))
    modes = (ModeSample("zigzag", 4096, True, 1.1),)
    costs = Costs(1.0, 2.0, kernels=kernels, messages=(MessageSample(8, 1, 1e-5),), modes=modes)
    cluster = Cluster("two", 2, 4, Mesh(100.0), Network(1, 1.0))
    return Calibration("NVIDIA H200", "cudnn", "peer", cluster, GQA, costs, {"date": "2026-01-01"})


def test_calibrations_round_trip(tmp_path: Path, calibration: Calibration) -> None:
    path = calibration_path(calibration.device, 8, GQA, "peer", tmp_path / "cache")
    assert path.name == "NVIDIA-H200-8ranks-peer-32x8x128-2bytes.json"
    save_calibration(calibration, path)
    assert load_calibration(path) == calibration
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert calibration_path("NVIDIA H200", 8, replace(GQA, batch=4), "peer", tmp_path / "cache") == path


def test_older_calibrations_are_read(tmp_path: Path, calibration: Calibration) -> None:
    path = tmp_path / "old.json"
    save_calibration(calibration, path)
    data = json.loads(path.read_text())
    del data["costs"]["modes"]
    data["costs"]["host_operation_s"] = 1e-4  # nothing uses it now
    path.write_text(json.dumps(data))
    assert load_calibration(path) == replace(calibration, costs=replace(calibration.costs, modes=()))


def test_measured_passes_decide_between_modes() -> None:
    """Also between measured lengths, and against modes that were not measured."""
    problem, cluster = problem_of(4, 4 * 4096, GQA), load_cluster("h200_x8").resized(4)
    first, second, *rest = (candidate for candidate in rank_modes(problem, cluster, FAST) if not candidate.reason)

    def ranked(length: int, *samples: ModeSample) -> list[str]:
        problem = problem_of(4, length, GQA)
        return names(rank_modes(problem, cluster, replace(FAST, modes=samples)))

    def both(mode: str, length: int, ratio: float) -> list[ModeSample]:
        return [ModeSample(mode, length, backward, ratio) for backward in (False, True)]

    short, long = problem.mask.length, 4 * problem.mask.length
    slow = [*both(first.name, short, 2.0), *both(first.name, long, 1.0)]
    assert ranked(short, *slow, *both(second.name, short, 1.0))[0] == second.name
    assert ranked(short, *both(first.name, short, 2.0))[0] == first.name, "others were not measured"
    costs = replace(FAST, modes=tuple(slow))
    assert costs.correction(first.name, short, False) == 2.0 and costs.correction(first.name, 100 * long, True) == 1.0
    assert costs.correction(first.name, 2 * short, True) == pytest.approx(1.5)
    assert costs.correction(rest[0].name, short, True) == 2.0 and FAST.correction("zigzag", 8, True) == 1.0
    (found,) = rank_modes(problem, cluster, costs, candidates=[first.mode])
    assert found.seconds == pytest.approx(2 * first.seconds)


def test_corrections_fade_beyond_the_longest_measured_length() -> None:
    modes = [("slow", 1000, 0.9), ("slow", 4000, 1.2), ("fast", 4000, 0.8)]
    costs = replace(FAST, modes=tuple(ModeSample(mode, length, False, ratio) for mode, length, ratio in modes))

    def corrections(mode: str, *lengths: int) -> list[float]:
        return [costs.correction(mode, length, False) for length in lengths]

    assert corrections("slow", 8, 1000, 2000, 4000) == pytest.approx([0.9, 0.9, 1.05, 1.2])
    assert corrections("slow", 8000, 40000) == pytest.approx([1.1, 1.02])
    assert corrections("fast", 8, 4000, 8000, 40000) == pytest.approx([0.8, 0.8, 0.9, 0.98])
    assert corrections("another", 1000, 8000) == pytest.approx([0.9, 1.1]), "the largest measured one"
    assert costs.correction("slow", 8000, True) == 1.0


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_path("cpu", 2, GQA, "p2p").parent == tmp_path / "megatron_longctx"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 99}'])
def test_other_files_are_not_calibrations(tmp_path: Path, content: str, calibration: Calibration) -> None:
    path = tmp_path / "c.json"
    with pytest.raises(ValueError, match=r"expected a calibration\. Run `megatron-longctx calibrate`"):
        load_calibration(path)
    path.write_text(content)
    with pytest.raises(ValueError, match=r"expected a calibration of version 2 .*`megatron-longctx calibrate` again"):
        load_calibration(path)
    save_calibration(calibration, path)
    data = json.loads(path.read_text())
    data["costs"]["merge_gibps"] = 0
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="merge_gibps=0"):
        load_calibration(path)
    with pytest.raises(ValueError, match=r"expected a calibration of version 2 \(.*directory"):
        load_calibration(tmp_path)


def test_times_between_measured_calls_are_interpolated() -> None:
    square = tuple(KernelSample(q, k, False, False, 1, q * k * 1e-9) for q in (64, 256) for k in (64, 256))
    costs = Costs(1e-6, 1e-6, kernels=square)

    def seconds(queries: int, keys: int) -> float:
        return costs.call_seconds(KernelCall((Segment(0, queries, 0, keys),)), ALL_HEADS, GQA, False)

    for q, k in ((64, 64), (128, 64), (100, 200), (256, 256), (1024, 1024)):
        assert seconds(q, k) == pytest.approx(q * k * 1e-9)
    assert seconds(8, 64) == pytest.approx(64 * 64 * 1e-9)  # not less than the shortest call


def test_send_memory_of_peers_counts_against_the_bound() -> None:
    cluster = load_cluster("h200_x8")
    problem, zigzag = problem_of(8, 2**17), [MODES["zigzag"]()]
    over_peers = replace(problem, target=replace(problem.target, over_peers=True))
    (messages,) = rank_modes(problem, cluster, candidates=zigzag)
    (peers,) = rank_modes(over_peers, cluster, candidates=zigzag)
    assert peers.peak_bytes > messages.peak_bytes
    (refused,) = rank_modes(replace(over_peers, max_bytes=messages.peak_bytes), cluster, candidates=zigzag)
    assert "GiB" in refused.reason


def test_the_choice_depends_on_the_documents() -> None:
    """Documents on one rank need no communication in a ring, but do if ranks share the heads."""
    cluster, n = Cluster("mesh", 1, 8, Mesh(1.0)), 8
    modes, work = [MODES["ring"](), MODES["ulysses"]()], Workload(32, 32, 128)
    pack, whole = (
        {c.name: c.seconds for c in rank_modes(problem_of(n, mask, work), cluster, FAST, candidates=modes)}
        for mask in (documents([1024] * n), causal(1024 * n))
    )
    assert 2 * pack["ring"] < pack["ulysses"] and 2 * pack["ring"] < whole["ring"]
