"""Offline files of W&B, written by training and by `wandb sync`, as W&B's own reader reads them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from megatron_longctx.cli import cli
from megatron_longctx.config import names
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.compare.runs import METRICS
from megatron_longctx.training.compose import load_config
from megatron_longctx.training.metrics.sinks import decode
from tests.shared.training import Job, run_jobs, tiny_config, tiny_corpus

SETTINGS = {"parallelism.context_parallel_size": 2, "train.save": True, "logging.wandb": "offline",
            "optim.decay_steps": 4, "data.split": "60,40", "train.eval_interval": 2, "train.eval_samples": 2,
            "logging.peak_tflops": 0.5}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps, resumed after two."""
    root = tmp_path_factory.mktemp("wandb")
    tiny_corpus(root / "corpus")
    jobs = [Job(tiny_config(root, "mine", {**SETTINGS, "train.steps": steps})) for steps in (2, 4)]
    run_distributed(run_jobs, 2, jobs)
    return root / "mine"


@pytest.fixture
def wandb_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that sets WANDB_MODE, which W&B reads once per process."""

    def set_mode(mode: str) -> None:
        monkeypatch.setenv("WANDB_MODE", mode)
        wandb.teardown()

    yield set_mode
    wandb.teardown()


def wandb_files(run: Path) -> list[Path]:
    return sorted(run.glob("wandb/offline-run-*/run-*.wandb"))


def read(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the run's own record, and the logged metrics keyed by step."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    records = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    found = {item["_step"]: {key: value for key, value in item.items() if key[0] != "_"} for item in items}
    assert len(found) == len(items), "a step is logged twice"
    (about,) = [record["run"] for record in records if record["type"] == "run"]
    return about, found


def recorded(run: Path) -> dict[int, dict[str, Any]]:
    """Return the content of `metrics.jsonl` in the form of W&B's reader."""
    lines = map(decode, (run / "metrics.jsonl").read_text().splitlines())
    return {
        int(line[names.STEP] or 0): {
            key: "NaN" if isinstance(value, float) and math.isnan(value) else value
            for key, value in line.items()
            if value is not None
        }
        for line in lines
    }


def check_labels(run: Path, about: dict[str, Any]) -> None:
    expected = {
        "run_id": (run / "wandb_id.txt").read_text().strip(),
        "display_name": "mine",
        "project": "megatron-longctx",
        "run_group": "tiny-96",
        "job_type": "zigzag",
        "tags": ["tiny", "zigzag", "layout zigzag", "cp2", "tp1", "pp1", "dp1", "cpu", "fp32"],
    }
    assert {key: about[key] for key in expected} == expected
    config = about["config"]["update"]
    assert {key: config[key] for key in load_config(run / "resolved.yaml").as_dict()} == json.loads(
        json.dumps(load_config(run / "resolved.yaml").as_dict())
    )
    assert config["peak_tflops_per_gpu"] == 0.5 and config["flop_formula"].startswith("3 * (2*T*L*A")
    assert config["facts"]["parallelism"] == "cp2" and config["environment"]["ranks"] == 2


def test_offline_files_have_the_records_of_metrics_jsonl(trained: Path) -> None:
    """Both parts of a resumed run have one id."""
    found: dict[int, dict[str, Any]] = {}
    for path in wandb_files(trained):
        about, steps = read(path)
        assert about["run_id"] == (trained / "wandb_id.txt").read_text().strip()
        found |= steps
    check_labels(trained, about)
    assert found == recorded(trained) and list(found) == [1, 2, 3, 4]
    assert names.VALIDATION_LOSS in found[2] and names.VALIDATION_LOSS not in found[3]


def test_a_run_is_rebuilt_from_its_folder(
    trained: Path, wandb_mode: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    metrics, before = trained / "metrics.jsonl", wandb_files(trained)
    diverged = '"nonfinite": {"train/lr": "nan"}, "train/grad_norm": '
    metrics.write_text(metrics.read_text().replace('"train/grad_norm": ', diverged, 1))
    wandb_mode("offline")
    assert cli.main(["wandb", "sync", str(trained)]) == 0
    (path,) = set(wandb_files(trained)) - set(before)
    assert f"{trained}: 4 steps, to 4: {path.parent}" in capfd.readouterr().out
    about, found = read(path)
    check_labels(trained, about)
    assert found == recorded(trained) and found[1]["train/lr"] == "NaN"


def test_runs_log_all_metrics_of_the_views(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    shown = {names.LOSS, names.VALIDATION_LOSS, names.STEP, *(metric.key for metric in METRICS)}
    assert all(shown <= line.keys() for line in lines)


@pytest.mark.parametrize("missing", ["metrics.jsonl", "resolved.yaml", ""])
def test_a_folder_without_metrics_is_refused(
    trained: Path, tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the other runs is sent before."""
    other = tmp_path / "other"
    if missing:
        other.mkdir()
        for name in {"metrics.jsonl", "resolved.yaml"} - {missing}:
            (other / name).write_bytes((trained / name).read_bytes())
    before = wandb_files(trained)
    assert cli.main(["wandb", "sync", str(trained), str(other)]) == 2
    assert str(other / missing) in capsys.readouterr().err and wandb_files(trained) == before


def test_a_disabled_wandb_is_refused(
    trained: Path, wandb_mode: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    wandb_mode("disabled")
    assert cli.main(["wandb", "sync", str(trained)]) == 2
    assert "WANDB_MODE=disabled: expected online or offline" in capsys.readouterr().err
