"""Files of cases: the committed ones compose, and invalid ones are refused by name."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import yaml

from analysis import training_cases
from analysis.training_cases import main, read_cases
from megatron_longctx.config.files import bundled
from megatron_longctx.testing.distributed import run_quickly
from tests.shared.training import tiny_corpus

FILES = sorted((bundled("analysis") / "cases").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_cases_compose(path: Path) -> None:
    cases = read_cases(path)
    names = [config.run.name for config in cases.configs]
    assert cases.title and names and len(set(names)) == len(names)
    assert all(config.train.device == "cuda" and not config.train.save for config in cases.configs)
    assert cases.baselines == {name: re.sub(r".*(?=te_)", "", name) for name in names if "te_" in name}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: a", "`cases:`"),
        ("cases: {a: []}", "`title:`"),
        ("{", "a readable YAML file"),
        ("{title: a, cases: {a: [model.num_layers=0]}}", "model.num_layers=0"),
        ("{title: a, cases: {a: [baseline=p2p]}}", "baseline=p2p: expected one of te_p2p, te_all_gather, te_a2a."),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text(text)
    assert main([str(path), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.yaml"), str(tmp_path / "out")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_cases_run_one_after_the_other_and_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(training_cases, "prepare", None)  # nothing is missing
    monkeypatch.setattr(training_cases, "run_ranks", partial(run_quickly, threads=1))
    prefix = f"0.7 {tmp_path}/corpus 0.3 {tmp_path}/more"
    tiny_corpus(tmp_path / "corpus")
    tiny_corpus(tmp_path / "more", seed=1)
    words = [
        *("model=tiny", "model.num_layers=1", "train.device=cpu", "train.precision=fp32", "train.steps=2"),
        *("train.save=false", "optim.warmup_steps=0", "parallelism=cp2", "logging.wandb=disabled"),
        *("data.seq_length=32", f"data.prefix={prefix}", f"run.root={tmp_path / 'runs'}"),
    ]
    cases = {"title": "two", "shared": words, "cases": {"plain": [], "kept": ["recompute=attention_output"]}}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases, sort_keys=False))
    assert main([str(tmp_path / "cases.yaml"), str(tmp_path / "out"), "--timeout", "1800"]) == 0
    plain, kept = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [step["train/loss"] for step in plain["steps"]] == [step["train/loss"] for step in kept["steps"]]
    assert len(plain["steps"]) == 2 and kept["config"]["recompute"]["mode"] == "attention_output"
    assert plain["medians"]["predicted_peak_gib"] > 0
    assert "| kept |" in (tmp_path / "out.md").read_text()
