"""Offline files of W&B, written by training and by `wandb sync`, as W&B's own reader reads them."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import pytest
import wandb

from megatron_longctx.cli import cli
from megatron_longctx.config import names
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training import metrics as sinks
from megatron_longctx.training.compose import load_config
from megatron_longctx.training.metrics import METRICS, WandbSink, decode
from tests.shared.training import Job, changed, run_jobs, tiny_config, tiny_corpus

LOGIN = f"machine {urlsplit(wandb.Settings().base_url).hostname} login user password {'0' * 40}"
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


def records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file as W&B's own reader prints them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    return [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]


def read(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the run's own record, and the logged metrics keyed by step."""
    found_records = records(path)
    items = [record["history"]["item"] for record in found_records if record["type"] == "history"]
    found = {item["_step"]: {key: value for key, value in item.items() if key[0] != "_"} for item in items}
    assert len(found) == len(items), "a step is logged twice"
    (about,) = [record["run"] for record in found_records if record["type"] == "run"]
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


def test_the_environment_wins_over_keys_and_a_line_says_where(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WANDB_ENTITY", "theirs"), ("WANDB_PROJECT", "else"), ("WANDB_NAME", "named")):
        monkeypatch.setenv(name, value)
    settings = {"notes": "why", "entity": "mine", "project": "mine", "checkpoints": True}
    config = changed(load_config(trained / "resolved.yaml"), {f"logging.wandb_{k}": v for k, v in settings.items()})
    run, lines = tmp_path / "a run", list[str]()
    run.mkdir()
    (run / "metrics.jsonl").write_bytes((trained / "metrics.jsonl").read_bytes())
    wandb.teardown()
    try:
        sink = WandbSink(run, config, lines.append)
        sink.checkpoint(checkpoint := trained / "checkpoints/iter_0000004", 4)
        sink.close()
    finally:
        monkeypatch.undo()
        wandb.teardown()
    (path,) = wandb_files(run)
    assert lines == [f"W&B: offline in {path.parent}; to send it: wandb sync '{path.parent}'"]
    about, _ = read(path)
    assert {key: about[key] for key in ("entity", "project", "display_name", "notes")} == {
        "entity": "theirs", "project": "else", "display_name": "named", "notes": "why",
    }  # fmt: skip
    (artifact,) = [record["artifact"] for record in records(path) if record["type"] == "artifact"]
    assert sorted(artifact["aliases"]) == ["latest", "step-4"]
    assert {each["ref"] for each in artifact["manifest"]["contents"]} == {f.as_uri() for f in checkpoint.iterdir()}


def test_the_summary_has_medians_after_the_warm_up(trained: Path) -> None:
    """Of both parts of the resumed run."""
    speeds = [recorded(trained)[step][names.TOKENS_PER_S] for step in (2, 3, 4)]
    found: dict[str, Any] = {}
    for record in records(wandb_files(trained)[-1]):
        found |= record.get("summary", {}).get("update", {})
    assert found["median/tokens_per_s"] == median(speeds)


@pytest.mark.parametrize(
    ("asked", "variable", "netrc", "mode"),
    [
        ("auto", None, "", "offline"),
        ("auto", None, LOGIN, "online"),
        ("offline", None, LOGIN, "offline"),
        ("offline", "online", "", "online"),
        ("online", "disabled", "", "disabled"),
        ("auto", "dryrun", "", "offline"),
    ],
)
def test_where_a_run_goes(
    asked: str, variable: str | None, netrc: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WANDB_MODE wins; without it and without a key, a login decides."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "netrc").write_text(netrc)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    wandb.teardown()
    assert sinks.wandb_mode(asked) == mode


def test_without_a_server_an_online_run_is_written_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    config, lines = tiny_config(tmp_path, "mine", {"logging.wandb": "online"}), list[str]()
    wandb.teardown()
    try:
        with pytest.warns(UserWarning, match="W&B cannot be reached and writes offline"):
            sink = WandbSink(tmp_path / "mine", config, lines.append)
        sink.write({names.STEP: 1, names.LOSS: 2.0})
        sink.close()
    finally:
        monkeypatch.undo()
        wandb.teardown()
    (path,) = wandb_files(tmp_path / "mine")
    assert str(path.parent) in lines[0] and read(path)[1] == {1: {names.STEP: 1, names.LOSS: 2.0}}


def test_a_run_is_rebuilt_from_its_folder(
    trained: Path, wandb_mode: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    metrics, before = trained / "metrics.jsonl", wandb_files(trained)
    diverged = '"nonfinite": {"train/lr": "nan"}, "train/grad_norm": '
    metrics.write_text(metrics.read_text().replace('"train/grad_norm": ', diverged, 1))
    wandb_mode("offline")
    assert cli.main(["wandb", "sync", str(trained)]) == 0
    (path,) = set(wandb_files(trained)) - set(before)
    assert f"{trained}: 4 steps, to 4: offline in {path.parent}; to send it: wandb sync" in capfd.readouterr().out
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
