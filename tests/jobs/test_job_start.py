"""A run from its start to its end: what it prints, what it leaves, how it resumes, and what it refuses to resume."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from megatron_longctx import cli, names
from megatron_longctx.compose import compose_config, load_config
from megatron_longctx.testing.jobs import CLI, Job, finished, latest_checkpoint, steps_recorded
from megatron_longctx.training import launcher

# Everything a run may print, besides the line of each step.
OURS = (
    r"starting 2 cpu ranks; run folder runs/first",
    r"\d\d:\d\d:\d\d transformer layers: Megatron-Core \(local\)",
    r"\d\d:\d\d:\d\d attention kernel: cpu",
    r"\d\d:\d\d:\d\d random states not restored: .*",
    r"\d\d:\d\d:\d\d resumed from step \d+ of runs/first/checkpoints",
    r"\d\d:\d\d:\d\d saved runs/first/checkpoints/iter_\d{7} in [\d.]+ s",
)
STEP = (
    r"\d\d:\d\d:\d\d step (\d)/\d \| loss \d\.\d{5} \| grad norm \d+\.\d{3} \| lr \d\.\d\de[+-]\d\d \| "
    r"[\d,]+ tokens/s \| [\d.e-]+ TFLOP/s/GPU \| MFU — \| mem — GiB \| ETA 0:\d\d:\d\d"
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tiny: tuple[str, ...]) -> tuple[Path, Job, Job]:
    """The working directory of a run with context parallelism that was resumed with tensor parallelism."""
    place = tmp_path_factory.mktemp("first")
    (place / "data").symlink_to(corpus)
    words = [*CLI, "train", *tiny, "run.name=first", "logging.wandb=offline", "train.precision=bf16"]
    first = finished(place, [*words, "train.steps=3", "parallelism=cp2", "train.save_interval=2"])
    second = finished(place, [*words, "train.steps=5", "parallelism.tensor_parallel_size=2"])
    return place, first, second


def test_both_end_with_success(jobs: tuple[Path, Job, Job]) -> None:
    place, first, second = jobs
    assert first.process.returncode == 0, first.said()
    assert second.process.returncode == 0, second.said()
    assert first.left_over() == [] and second.left_over() == []
    assert steps_recorded(place / "runs/first") == [1, 2, 3, 4, 5]
    assert latest_checkpoint(place / "runs/first") == 5


def test_nothing_is_printed_that_is_not_ours(jobs: tuple[Path, Job, Job]) -> None:
    _, *both = jobs
    for job, steps in zip(both, (["1", "2", "3"], ["4", "5"]), strict=True):
        assert job.err.read_text() == ""
        lines = job.out.read_text().splitlines()
        strange = [line for line in lines if not any(re.fullmatch(form, line) for form in (*OURS, STEP))]
        assert strange == []
        assert [found.group(1) for line in lines if (found := re.fullmatch(STEP, line))] == steps
        assert sum("attention kernel" in line for line in lines) == 1


def test_the_log_has_the_lines_of_all_steps(jobs: tuple[Path, Job, Job]) -> None:
    place, *both = jobs
    log = (place / "runs/first/log.txt").read_text().splitlines()
    assert [found.group(1) for line in log if (found := re.fullmatch(STEP, line))] == list("12345")
    printed = "".join(job.out.read_text() for job in both).splitlines()
    assert log == [line for line in printed if not line.startswith("starting ")]


def test_the_run_folder_is_complete(jobs: tuple[Path, Job, Job]) -> None:
    place, *_ = jobs
    run = place / "runs/first"
    config, earlier = load_config(run / "resolved.yaml"), load_config(run / "resolved.until_step_3.yaml")
    assert (config.parallelism.tensor_parallel_size, config.parallelism.context_parallel_size) == (2, 1)
    assert (earlier.parallelism.tensor_parallel_size, earlier.parallelism.context_parallel_size) == (1, 2)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        *("iter_0000002", "iter_0000003", "iter_0000005"),
        "latest_checkpointed_iteration.txt",
    ]
    assert len(list(run.glob("wandb/offline-run-*/*.wandb"))) == 2
    assert not (run / "errors").exists()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record[names.TOKENS] for record in records] == [64, 128, 192, 256, 320]
    assert records[-1][names.LOSS] < records[0][names.LOSS]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.main(["train", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.removeprefix("megatron-longctx train: ").rstrip()


@pytest.fixture
def resuming(
    jobs: tuple[Path, Job, Job], tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Settings that go on with a copy of the run, in the current directory, where ranks must not be started."""
    shutil.copytree(jobs[0], tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def started_anyway(*arguments: object, **more: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launcher.mp, "start_processes", started_anyway)
    return [*tiny, "run.name=first", "train.precision=bf16", "train.steps=9"]


def test_the_run_itself_may_go_on(resuming: list[str]) -> None:
    with pytest.raises(AssertionError, match="ranks were started"):
        cli.main(["train", *resuming])


def test_a_checkpoint_of_another_model_is_refused(resuming: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("runs/first/resolved.yaml").read_text()
    said = refused([*resuming, "model.hidden_size=64"], capsys)
    assert said.startswith("runs/first/checkpoints/iter_0000005 is of another model (")
    assert "hidden_size: checkpoint 32, model 64" in said and "expected equal" in said and "choose another" in said
    assert Path("runs/first/resolved.yaml").read_text() == before, "a refused job has changed the run"


def test_another_batch_size_is_refused(resuming: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused([*resuming, "train.global_batch_size=2"], capsys)
    assert said == (
        "train.global_batch_size=2: expected 1, with which runs/first has been trained so far. "
        "Set it back, or start a run of another run.name."
    )


def test_a_cut_checkpoint_is_refused(resuming: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    victim = sorted(Path("runs/first/checkpoints/iter_0000005").glob("*.distcp"))[0]
    victim.write_bytes(victim.read_bytes()[:100])
    said = refused(resuming, capsys)
    assert said.startswith(str(victim)) and "has 100 bytes, expected " in said and "restore the checkpoint" in said


def test_a_checkpoint_that_is_gone_is_refused(resuming: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree("runs/first/checkpoints/iter_0000005")
    said = refused(resuming, capsys)
    assert said.startswith("runs/first/checkpoints/iter_0000005 does not exist, expected the checkpoint")


def test_a_resolved_yaml_of_another_version_does_not_stop_a_run(resuming: list[str]) -> None:
    path = Path("runs/first/resolved.yaml")
    path.write_text(path.read_text() + "novelty: 1\n")
    with pytest.raises(AssertionError, match="ranks were started"):
        cli.main(["train", *resuming])
    assert load_config(path) == compose_config(resuming)
    assert "novelty" in Path("runs/first/resolved.until_step_5.yaml").read_text()
