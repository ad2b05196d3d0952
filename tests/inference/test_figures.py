"""The choice of mode goes by this device's calibration where there is one, then by the cluster named, then by bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_longctx.compose import compose_config
from megatron_longctx.config import Config, workload_of
from megatron_longctx.inference import figures
from megatron_longctx.inference.choice import Chooser
from megatron_longctx.inference.figures import calibration_file, known_figures
from megatron_longctx.mcore.inference import for_inference
from megatron_longctx.schedules import Costs
from megatron_longctx.schedules.calibration import Calibration, save_calibration
from megatron_longctx.topology import Cluster, Network
from tests.inference.histories import batch_with_past

CPU = torch.device("cpu")


def config_of(*words: str) -> Config:
    return compose_config(["parallelism=cp2", "train.device=cpu", *words])


def calibrated(config: Config, folder: Path, gibps: float, batch: int = 1) -> None:
    """Leave a calibration of `config` whose links have `gibps`."""
    cluster = Cluster("measured", 2, 1, network=Network(1, gibps, 1e-5))
    workload = replace(workload_of(config), batch=batch)
    found = Calibration("cpu", "cpu", "p2p", cluster, workload, Costs(0.5, 0.5))
    save_calibration(found, calibration_file(config, CPU, folder))


def test_a_calibration_comes_before_the_cluster(tmp_path: Path) -> None:
    config = config_of("parallelism.cluster=tcp")
    named = known_figures(config, CPU, tmp_path)
    assert named.cluster is not None and named.cluster.name != "measured" and named.costs is None
    calibrated(config, tmp_path, 3.0)
    found = known_figures(config, CPU, tmp_path)
    assert found.cluster is not None and found.cluster.name == "measured" and found.flops == 0.5e12
    assert found.bandwidth == 3 * 2**30
    decision = Chooser(found).choose(batch_with_past(2, [(40,)], [8]))
    assert decision.rule == "simulation" and decision.seconds


def test_what_was_measured_on_batches_is_not_taken(tmp_path: Path) -> None:
    config = config_of()
    calibrated(config, tmp_path, 3.0, batch=2)
    assert known_figures(config, CPU, tmp_path).cluster is None


def test_a_rank_alone_and_unknown_links(tmp_path: Path) -> None:
    calibrated(config_of(), tmp_path, 3.0)
    alone = known_figures(config_of("parallelism.context_parallel_size=1"), CPU, tmp_path)
    assert alone.cluster is None
    other_heads = known_figures(config_of("model.num_kv_heads=4"), CPU, tmp_path)
    assert other_heads.cluster is None and Chooser(other_heads)._rule == "bytes"
    with pytest.raises(ValueError, match="longctx calibrate"):
        Chooser(other_heads, rule="simulate")


def test_a_broken_calibration_is_refused(tmp_path: Path) -> None:
    config = config_of()
    path = calibration_file(config, CPU, tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected a calibration"):
        known_figures(config, CPU, tmp_path)


def test_the_calibration_is_that_of_the_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over_peers, either = config_of("inference.transport=peer"), config_of("inference.transport=auto")
    calibrated(config_of(), tmp_path, 3.0)
    assert known_figures(over_peers, CPU, tmp_path).costs is None
    assert calibration_file(over_peers, CPU, tmp_path) != calibration_file(config_of(), CPU, tmp_path)
    assert calibration_file(either, CPU, tmp_path) == calibration_file(config_of(), CPU, tmp_path)
    gpu = torch.device("cuda")
    monkeypatch.setattr(figures, "environment", lambda: {"device": "NVIDIA H200"})
    calibration_file(config_of(), gpu, tmp_path).touch()
    assert calibration_file(either, gpu, tmp_path) == calibration_file(config_of(), gpu, tmp_path)  # the only one
    nothing = tmp_path / "nothing"
    assert calibration_file(either, gpu, nothing) == calibration_file(over_peers, gpu, nothing)


def test_peer_memory_is_refused_on_cpus_before_ranks_start() -> None:
    with pytest.raises(ValueError, match=r"inference\.transport=peer: expected auto or p2p on CPUs"):
        for_inference(config_of("inference.transport=peer"))
    assert for_inference(config_of("inference.transport=auto")).inference.transport == "auto"
