"""`submit` composes a job's configuration and copies the code once; a fake `sbatch` records how it is called."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_longctx.cli import cli
from megatron_longctx.training.compose import compose_config, load_config, save_config


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a fake sbatch on PATH."""
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >called\nenv >environment\necho Submitted batch job 7\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_shows_the_command_and_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", "--dry-run", "train", "--nodes=2", "experiment=demo", "run.name=a"]) == 0
    first = capsys.readouterr().out
    assert cli.main(["submit", "train", "--nodes=2", "experiment=demo", "run.name=a", "--dry-run"]) == 0
    for words in map(shlex.split, (first, capsys.readouterr().out)):
        words = words[words.index("sbatch") :]
        assert words[1:4] == ["--job-name=a", f"--output={place}/runs/a/slurm-%j.log", "--nodes=2"]
        assert words[4].endswith("/code/launch/train.sbatch") and words[5] == "--resolved"
    assert sorted(path.name for path in place.iterdir()) == ["bin"]


def test_the_job_has_a_copy_of_code_and_configuration(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", "train", "experiment=demo", "run.name=a", "train.steps=7"]) == 0
    assert "Submitted batch job 7" in capsys.readouterr().out
    *_, script, flag, resolved = (place / "called").read_text().split()
    assert flag == "--resolved" and load_config(Path(resolved)).train.steps == 7
    code = Path(script).parents[1]
    assert os.access(script, os.X_OK) and (code / "launch/job.sh").is_file()
    environment = dict(line.split("=", 1) for line in (place / "environment").read_text().splitlines() if "=" in line)
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(code) and environment.get("LONGCTX_COMMIT")
    program = "from megatron_longctx.config import files; print(files.__file__, files.bundled('recipes'))"
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [f"{code}/megatron_longctx/config/files.py", f"{code}/recipes"]


def test_a_sweep_has_a_run_for_every_combination(place: Path) -> None:
    swept = ["parallelism.schedule=ring,zigzag", "optim.lr=1e-3,2e-3", "run.name=s"]
    assert cli.main(["submit", "sweep", "experiment=demo", *swept]) == 0
    called = (place / "called").read_text().split()
    assert "--job-name=s" in called and "--array=1-4" in called and called[-2].endswith("/sweep.sbatch")
    runs = [load_config(Path(line.split()[1])) for line in Path(called[-1]).read_text().splitlines()]
    assert [run.run.name for run in runs] == ["s-ring-0.001", "s-ring-0.002", "s-zigzag-0.001", "s-zigzag-0.002"]
    assert [(run.parallelism.schedule, run.optim.lr) for run in runs[1:3]] == [("ring", 2e-3), ("zigzag", 1e-3)]


def test_a_server_requires_an_existing_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", "serve", "checkpoint=runs/a"]) == 2
    assert "runs/a/resolved.yaml: expected a run's configuration there" in capsys.readouterr().err
    (place / "runs/a").mkdir(parents=True)
    save_config(compose_config(["experiment=demo"]), place / "runs/a/resolved.yaml")
    assert cli.main(["submit", "serve", "--time=1", "checkpoint=runs/a"]) == 0
    assert (place / "called").read_text().split()[-1] == "checkpoint=runs/a"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "experiment=gone"], "experiment=gone: expected one of"),
        (["sweep", "experiment=demo"], "sweep: expected a setting with several values"),
        (["serve"], "checkpoint=: expected checkpoint=RUN"),
        (
            ["train", "-p", "gpu", "experiment=demo"],
            "word=-p gpu: expected options of sbatch as one word each. Write -pgpu.",
        ),
        (["train", "--qos", "high"], "word=--qos high: expected options of sbatch as one word each. Write --qos=high."),
    ],
)
def test_jobs_that_cannot_run_are_refused_before_submission(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.main(["submit", *words]) == 2
    assert message in capsys.readouterr().err and not (place / "called").exists()


def test_slurms_error_is_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    assert cli.main(["submit", "train", "experiment=demo"]) == 1
    assert "sbatch refused the job: sbatch: error: invalid partition" in capsys.readouterr().err
