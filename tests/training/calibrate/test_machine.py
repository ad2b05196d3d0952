"""The `calibrate` verb on CPU: `auto` uses the stored results, and what cannot be measured is refused."""

import os
from pathlib import Path

import pytest

from megatron_longctx.cli import cli
from megatron_longctx.config.cluster import load_cluster
from megatron_longctx.core.plans import MODES, Workload
from megatron_longctx.planner.calibration import load_calibration
from megatron_longctx.training import calibration
from megatron_longctx.training.auto import resolve_schedule
from megatron_longctx.training.calibration import summary
from megatron_longctx.training.compose import compose_config

SETTINGS = ["parallelism=cp2", "train.device=cpu", "attention.kernel=cpu", "data.seq_length=333"]


def test_auto_uses_the_stored_costs(cache: Path) -> None:
    heads = ["model.num_attention_heads=8", "model.num_kv_heads=4", "model.head_dim=16", "train.precision=fp32"]
    settings = [*SETTINGS, *heads, "parallelism.schedule=auto"]
    assert cli.main(["calibrate", *settings, "--max-tokens", "64"]) == 0
    (path,) = cache.glob("*.json")
    found = load_calibration(path)
    assert found.kernel == "cpu" and found.transport == "p2p" and found.cluster.n == 2
    assert found.workload == Workload(8, 4, 16, element_bytes=4), "the recipe's, but for the settings above"
    costs = found.costs
    assert costs.forward_tflops > 0 and costs.merge_gibps > 0 and 0 <= costs.blocking <= 1
    assert {(s.causal, s.backward, s.parts) for s in costs.kernels} >= {(True, False, 1), (False, True, 2)}
    assert all(sample.seconds > 0 for sample in (*costs.kernels, *costs.messages))
    # Steps of modes close to the fastest in simulation, unless a busy machine makes them take too long.
    assert {sample.length for sample in costs.modes} <= {2 * 64, 333}
    assert all(sample.ratio > 0 for sample in costs.modes)
    assert {sample.mode.split(" (")[0] for sample in costs.modes} <= set(MODES)
    assert all(any(sample.mode in line for line in summary(found)) for sample in costs.modes)
    chosen = resolve_schedule(compose_config(settings))[0].parallelism.schedule
    assert chosen in MODES, "it would be refused without the file"


def test_links_alone_are_written_as_a_cluster_file(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "here.yaml"
    assert cli.main(["calibrate", "parallelism.context_parallel_size=3", "train.device=cpu", "--links", str(out)]) == 0
    assert load_cluster(out).n == 3 and not cache.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens=0: expected 64 or more"),
        (["--links", "gone/x.yaml"], "--links=gone/x.yaml: expected a .yaml file in a folder that can be written"),
        (["--links", "here.yaml", "--max-tokens", "64"], "--max-tokens=64: expected none beside --links"),
        (["--links", "here.txt"], "--links=here.txt: expected a .yaml file"),
        (["attention.transport=peer"], "attention.transport=peer: expected auto or p2p on CPUs"),
        (["attention.kernel=flash"], "kernel='flash' cannot be used here"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "run_on_ranks", None)
    assert cli.main(["calibrate", "train.device=cpu", *words]) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
