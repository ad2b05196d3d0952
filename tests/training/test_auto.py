"""`parallelism.schedule=auto`: what it goes by, what it takes, what it refuses."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_longctx.compose import compose_config
from megatron_longctx.config import Config, workload_of
from megatron_longctx.mcore.data import first_pack
from megatron_longctx.schedules import Costs
from megatron_longctx.schedules.calibration import Calibration, calibration_path, save_calibration
from megatron_longctx.schedules.select import Candidate, Problem, select
from megatron_longctx.topology import Cluster, Mesh
from megatron_longctx.training import auto
from megatron_longctx.training.auto import settled
from tests.shared.training import tiny_corpus


def config(*words: str) -> Config:
    return compose_config(["train.device=cpu", "parallelism.schedule=auto", *words])


def test_any_other_mode_is_left_alone(tmp_path: Path) -> None:
    asked = compose_config(["parallelism=cp4", "parallelism.schedule=striped"])
    assert settled(asked, tmp_path) is asked


def test_one_rank_needs_no_choice(tmp_path: Path) -> None:
    assert settled(config(), tmp_path).parallelism.schedule == "zigzag"


def test_a_named_cluster_is_enough_and_the_ranking_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = settled(
            config("parallelism=cp4", "parallelism.schedule=auto", "parallelism.cluster=h200_x8"), tmp_path
        )
    taken = chosen.parallelism.schedule
    assert taken not in ("auto", "ring")
    said = caplog.text
    assert f"parallelism.schedule=auto takes {taken}" in said and "priced by cluster h200_x8" in said
    assert said.index(f"  {taken}") < said.index("  ring ")


def test_a_calibration_is_taken_before_a_cluster(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = config("parallelism=cp4", "parallelism.schedule=auto", "parallelism.cluster=h200_x8")
    workload = workload_of(asked)
    slow = Calibration("cpu", "cpu", "p2p", Cluster("slow", 1, 4, Mesh(0.01)), workload, Costs(0.1, 0.1))
    path = calibration_path("cpu", 4, workload, "p2p", tmp_path)
    save_calibration(slow, path)
    with caplog.at_level(logging.INFO):
        settled(asked, tmp_path)
    assert f"priced by {path}" in caplog.text


def test_nothing_to_go_by_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schedule='?auto'?: expected a calibration .* or parallelism\.cluster=NAME"):
        settled(config("parallelism=cp4", "parallelism.schedule=auto"), tmp_path)


def test_the_memory_bound_reaches_the_choice(tmp_path: Path) -> None:
    asked = config("parallelism=cp4", "parallelism.schedule=auto", "parallelism.cluster=h200_x8")
    tight = replace(asked, parallelism=replace(asked.parallelism, max_attention_gib=1e-9))
    with pytest.raises(ValueError, match="no mode can run"):
        settled(tight, tmp_path)


def test_packed_data_is_priced_by_its_first_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_corpus(tmp_path / "corpus")
    words = ["parallelism=cp4", "parallelism.schedule=auto", "parallelism.cluster=h200_x8", "data.seq_length=512"]
    words.append(f"data.prefix={tmp_path}/corpus")
    priced: list[Problem] = []

    def watched(problem: Problem, *rest: Any) -> list[Candidate]:
        priced.append(problem)
        return select(problem, *rest)

    monkeypatch.setattr(auto, "select", watched)
    for packing in ("none", "best_fit"):
        asked = config(*words, f"data.packing={packing}")
        settled(asked, tmp_path)
    assert [len(problem.mask.documents) for problem in priced] == [1, len(first_pack(asked))]
    assert len(first_pack(asked)) > 1
