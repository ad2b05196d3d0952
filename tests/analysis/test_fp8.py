"""The measurement of FP8: its runs compose, a failing one does not end the others, and comparisons find differences."""

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from analysis import fp8, fp8_weights
from megatron_longctx.testing.distributed import run_quickly
from tests.shared.training import tiny_corpus


def test_all_runs_compose(tmp_path: Path) -> None:
    one = ["train.steps=1", "optim.warmup_steps=0"]
    checks = {name: words for name, words in fp8.checks().items() if name.startswith("delayed")}
    every = fp8_weights.checks(("delayed",), fp8._SIX, fp8._TP2)
    for settings, more in ((fp8.QUICK, one), (checks, []), (fp8.curves(), []), (every, [])):
        cells, refused = fp8.cells_of(settings, more, tmp_path)
        assert not refused and {cell.name for cell in cells} == set(settings)
        assert {cell.config.train.fp8 for cell in cells} >= {"delayed"}
        assert all({cell.copy_of, cell.begins_with} - {None} <= set(settings) for cell in cells)
    everything = {**checks, **every}
    pairs = fp8.compare({name: _record(1.0) for name in everything})
    compared = {name for pair in pairs for name in pair["runs"]}
    assert compared == {name for name in everything if not name.endswith("saved")}


def _record(*losses: float) -> dict[str, Any]:
    return {
        "steps": [{"train/step": i, "train/loss": loss, "train/grad_norm": 1.0} for i, loss in enumerate(losses, 1)]
    }


def test_comparisons_find_differences() -> None:
    cells = {"delayed_cp2": _record(2.0, 4.0, 8.0), "delayed_again": _record(2.0, 4.0, 8.0)}
    cells |= {"delayed_cp1": _record(2.0, 5.0, 8.0), "delayed_replay": {"error": "no memory"}}
    cells["delayed_resumed"] = {"steps": _record(0.0, 0.0, 8.0)["steps"][2:]}
    cp1, again, resumed = fp8.compare(cells)
    assert (cp1["train/loss"], cp1["bits equal"], cp1["steps"]) == (0.25, False, 3)
    assert again["bits equal"] and resumed["bits equal"] and resumed["steps"] == 1
    bf16, delayed = fp8.compare_curves({"bf16": _record(4.0, 2.0), "delayed": _record(4.0, 2.06)})
    assert bf16["difference of the last 50 steps %"] == 0
    assert delayed["difference of all steps %"] == pytest.approx(1.0)


def test_a_failing_run_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on_cpu: None
) -> None:
    tiny_corpus(tmp_path / "corpus")
    monkeypatch.setattr(fp8, "run_ranks", partial(run_quickly, threads=1))
    words = (
        *("model=tiny", "model.num_layers=1", "model.implementation=local", "train.device=cpu", "parallelism=single"),
        *("train.precision=fp32", "data.seq_length=32", f"data.prefix={tmp_path / 'corpus'}", "data.workers=0"),
    )
    runs = {"fails": (*words, "baseline=te_p2p"), "refused": (*words, "train.fp8=delayed"), "works": words}
    monkeypatch.setattr(fp8, "QUICK", runs)
    assert fp8.main(["--quick", "--seconds", "500", "--ranks", "1", "--out", str(tmp_path / "out.json")]) == 1
    cells = json.loads((tmp_path / "out_quick.json").read_text())["cells"]
    assert "transformer_engine" in cells["fails"]["error"]
    assert "train.precision=fp32: expected bf16 with train.fp8=delayed" in cells["refused"]["error"]
    assert len(cells["works"]["steps"]) == 1
    printed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"fails", "refused", "works"} & set(printed) == {"refused"}  # the ranks print the others themselves


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs TransformerEngine")
def test_reruns_second_trainers_and_resumed_runs_have_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = fp8.checks()
    kinds = [f"{recipe}_{kind}" for recipe in fp8.RECIPES for kind in ("cp2", "again", "replay", "saved", "resumed")]
    monkeypatch.setattr(fp8, "checks", lambda: {name: (*whole[name], "parallelism=single") for name in kinds})
    assert fp8.main(["--checks", "--seconds", "500", "--ranks", "1", "--out", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out_checks.json").read_text())["comparisons"]
    assert len(found) == 9 and all(each["bits equal"] for each in found), found
