"""`parallelism.schedule=auto`: what it is based on, what it chooses, what it refuses."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.config import Config, workload_of
from megatron_longctx.config.cluster import Cluster, Mesh
from megatron_longctx.mcore.data import first_pack
from megatron_longctx.planner.calibration import Calibration, calibration_path, save_calibration
from megatron_longctx.planner.choose_mode import Candidate, Problem, choose_mode
from megatron_longctx.planner.cost import Costs
from megatron_longctx.training import auto
from megatron_longctx.training.auto import resolve_schedule
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.text import Source, prepare
from tests.shared.training import changed, tiny_corpus

ON_CLUSTER = "parallelism.cluster=h200_x8"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No calibrations, whatever this user has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(*words: str, parallelism: str = "cp4") -> Config:
    return compose_config(["train.device=cpu", f"parallelism={parallelism}", "parallelism.schedule=auto", *words])


def test_any_other_mode_is_unchanged() -> None:
    striped = compose_config(["parallelism=cp4", "parallelism.schedule=striped"])
    assert resolve_schedule(striped) == (striped, None)


def test_one_rank_needs_no_choice() -> None:
    resolved, reason = resolve_schedule(config(parallelism="single"))
    assert resolved.parallelism.schedule == "zigzag" and reason is None


def test_a_named_cluster_suffices_and_the_ranking_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        resolved, _ = resolve_schedule(config(ON_CLUSTER))
    chosen = resolved.parallelism.schedule
    assert chosen not in ("auto", "ring")
    assert f"parallelism.schedule=auto takes {chosen}" in caplog.text
    assert "priced by cluster h200_x8" in caplog.text
    assert caplog.text.index(f"  {chosen}") < caplog.text.index("  ring ")


def test_a_calibration_is_preferred_to_a_cluster() -> None:
    workload = workload_of(config(ON_CLUSTER))
    slow = Calibration("cpu", "cpu", "p2p", Cluster("slow", 1, 4, Mesh(0.01)), workload, Costs(0.1, 0.1))
    path = calibration_path("cpu", 4, workload, "p2p")
    save_calibration(slow, path)
    _, reason = resolve_schedule(config(ON_CLUSTER))
    assert reason and f"priced by {path}" in reason


def test_neither_calibration_nor_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule='?auto'?: expected a calibration .* or parallelism\.cluster=NAME"):
        resolve_schedule(config())


def test_the_memory_bound_limits_the_choice() -> None:
    tight = changed(config(ON_CLUSTER), {"parallelism.max_attention_gib": 1e-9})
    with pytest.raises(ValueError, match="no mode can run"):
        resolve_schedule(tight)


def test_packed_data_is_simulated_with_its_first_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_corpus(tmp_path / "corpus")
    problems: list[Problem] = []

    def recorded_choice(problem: Problem, *rest: Any) -> list[Candidate]:
        problems.append(problem)
        return choose_mode(problem, *rest)

    monkeypatch.setattr(auto, "choose_mode", recorded_choice)
    words = (ON_CLUSTER, "data.seq_length=512", f"data.prefix={tmp_path}/corpus")
    for packing in ("none", "best_fit"):
        packed = config(*words, f"data.packing={packing}")
        resolve_schedule(packed)
    assert [len(problem.mask.documents) for problem in problems] == [1, len(first_pack(packed)[0])]
    assert len(first_pack(packed)[0]) > 1
    (tmp_path / "tree.jsonl").write_text(json.dumps({"prompt": "a" * 101, "responses": ["b" * 9, "c" * 19]}))
    prepare(Source(f"{tmp_path}/tree.jsonl"), tmp_path / "corpus", "byte-level")
    resolve_schedule(config(*words, "data.packing=best_fit", "data.format=rollouts"))
    alone = sum(length * (length + 1) // 2 for length in (100, 11, 21))  # with the prompt's last token and the end
    assert problems[-1].mask.pairs == alone + 100 * (11 + 21)


def test_hybrid_models_are_compared_with_resharding_around_their_recurrent_layers() -> None:
    """The all-to-alls cost more than the schedules differ by, and longer sequences move more tokens."""
    found = {}
    for tokens in (65536, 131072):
        _, reason = resolve_schedule(config(ON_CLUSTER, "model=tiny_hybrid", f"data.seq_length={tokens}"))
        assert reason and "parallelism.schedule=auto takes" in reason
        pattern = (
            r"(\d) layers of attention take (\S+) ms with .* each of (\d) .* layers \((\S+) ms\), would take (\S+) ms"
        )
        match = re.search(pattern, reason)
        assert match and (match[1], match[3]) == ("1", "3")
        own, move, zigzag = (float(match[i]) for i in (2, 4, 5))
        assert 3 * move < zigzag and own < zigzag
        found[tokens] = move
    assert 1.2 < found[131072] / found[65536] <= 2
