"""A failing rank ends the whole job soon, with its message; wrong input ends it before ranks start."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_longctx.cli import cli
from megatron_longctx.config import names
from megatron_longctx.training import launcher
from megatron_longctx.training.compose import compose_config, load_config
from megatron_longctx.training.metrics import decode
from megatron_longctx.training.run_folder import RunFolder, RunLock
from tests.shared.jobs import (
    CLI,
    TINY,
    TORCHRUN_2,
    clean_environment,
    finished,
    latest_checkpoint,
    started,
    steps_recorded,
)
from tests.shared.processes import FILE_BYTES


def command(*more: str) -> list[str]:
    patient = "parallelism.timeout_s=7200"  # a rank that waits for a dead one hangs
    return [*CLI, "train", *TINY, "parallelism=cp2", patient, "train.steps=4000", *more]


def test_a_killed_rank_ends_the_job_and_a_hanging_one_is_named(workplace: Path) -> None:
    with started(workplace, command(), quick=True) as job:
        job.wait_for("step    2/")
        first, second = job.ranks()
        first.send_signal(signal.SIGSTOP)  # as if it hung: it handles only SIGKILL
        second.send_signal(signal.SIGKILL)
        assert job.wait() == 1, job.output()
        err = job.err.read_text()
        assert len(err.splitlines()) == 2, err
        hung, killed = err.splitlines()
        last = r"in (starting|step \d+(, [a-z ]+)?) since \d\d:\d\d:\d\d; "
        assert re.fullmatch(
            rf"megatron-longctx train: rank 0 had been stopped \(SIGSTOP\), {last}"
            "a rank waits at most parallelism.timeout_s=7200 s for the others",
            hung,
        ), hung
        assert re.match(rf"rank 1 was killed by SIGKILL, {last}out of memory\?", killed), killed
        assert "Traceback" not in err
        assert job.left_over() == []


def test_a_stopped_rank_ends_the_job_within_the_timeout(workplace: Path) -> None:
    with started(workplace, [*command(), "parallelism.timeout_s=40"], quick=True) as job:
        job.wait_for("step    2/")
        job.ranks()[1].send_signal(signal.SIGSTOP)
        assert job.wait() == 1, job.output()
        err = job.err.read_text()
        assert err.startswith("megatron-longctx train: rank 1 had been stopped (SIGSTOP), in "), err
        assert "rank 0 failed: " in err and "parallelism.timeout_s=40" in err
        assert job.left_over() == []


def test_a_restart_in_place_continues_the_same_curve(workplace: Path) -> None:
    words = ["train", *TINY, "parallelism=cp2", "train.steps=60", "train.save_interval=5", "train.keep_checkpoints=2"]
    whole = finished(workplace, [*CLI, *words, "run.name=whole"], quick=True)
    assert whole.process.returncode == 0, whole.output()
    torchrun = [*TORCHRUN_2[:5], "--max-restarts=1", *TORCHRUN_2[5:]]
    with started(workplace, [*torchrun, *words, "run.name=restarted"], quick=True) as job:
        job.wait_for("step 12/")  # the checkpoint of step 10 may be incomplete
        job.ranks()[1].kill()
        assert job.wait() == 0, job.output()
        assert "resumed from step " in job.out.read_text()
    curves = [(workplace / f"runs/{name}/metrics.jsonl").read_text().splitlines() for name in ("whole", "restarted")]
    steps = [[(line[names.STEP], line[names.LOSS], line[names.GRAD_NORM]) for line in map(decode, c)] for c in curves]
    assert steps[0] == steps[1] and len(steps[0]) == 60


def test_a_failing_rank_reports_its_error(workplace: Path) -> None:
    checkpoints = workplace / "runs/default/checkpoints"
    with started(workplace, command(), quick=True) as job:
        job.wait_for("step    2/")
        shutil.rmtree(checkpoints)
        checkpoints.write_text("in the way")  # so that the save on TERM fails
        job.process.terminate()
        assert job.wait() == 1, job.output()
        err = job.err.read_text().splitlines()
        assert len(err) == 2, err
        assert err[0].startswith("megatron-longctx train: rank ") and "checkpoints" in err[0], err
        assert "failed: " in err[0] and "Error" in err[0]
        note = workplace / err[1].removeprefix("(its traceback: ").removesuffix(")")
        assert "Traceback (most recent call last)" in note.read_text()
        assert job.left_over() == []


def test_a_full_disk_is_named_and_the_last_checkpoint_is_safe(workplace: Path) -> None:
    assert finished(workplace, command("train.steps=2"), quick=True).process.returncode == 0
    # The limit on file sizes: the run's small files are below it, a checkpoint's tensors are not.
    job = finished(workplace, command("train.save_interval=2"), clean_environment(**{FILE_BYTES: "102400"}), quick=True)
    assert job.process.returncode == 1, job.output()
    err = job.err.read_text().splitlines()
    assert len(err) == 2 and re.match(
        r"megatron-longctx train: rank \d failed: DiskFull: runs/default/checkpoints/iter_0000004\.partial cannot be "
        r"written \(.*File too large.*\)\. [\d,]+ of [\d,]+ MiB are free on /.*\. "
        r"runs/default/checkpoints/iter_0000002 \(\d MiB\) is safe\. Free space, .* goes on from step 2\.$",
        err[0],
    ), err
    left = sorted(path.name for path in (workplace / "runs/default/checkpoints").iterdir())
    assert left == ["iter_0000002", "latest_checkpointed_iteration.txt"], "an incomplete checkpoint is removed"
    assert job.left_over() == []


def test_under_torchrun_a_failing_rank_names_itself_without_traceback(workplace: Path) -> None:
    settings = ["train", *TINY, "parallelism=cp2", "train.steps=2"]
    (workplace / "runs/default").mkdir(parents=True)
    (workplace / "runs/default/metrics.jsonl").mkdir()  # rank 0 cannot open it; rank 1 is not affected
    job = finished(workplace, [*TORCHRUN_2, *settings], quick=True)
    assert job.process.returncode == 1
    err = job.err.read_text()
    assert "megatron-longctx train: rank 0 failed: IsADirectoryError: " in err
    assert 'File "/' not in err.split("megatron-longctx train: rank 0 failed")[0], "no traceback"
    assert job.left_over() == []


def test_a_second_job_of_the_same_run_is_refused_and_the_first_continues(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with started(workplace, command(), quick=True) as job:
        job.wait_for("step    2/")
        assert cli.main(["train", *TINY, "train.steps=3"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("megatron-longctx train: run.name=default: expected a run that no other job is")
        assert f"process {job.process.pid}, since " in err and err.count("\n") == 1
        assert load_config(workplace / "runs/default/resolved.yaml").train.steps == 4000, (
            "the refused job wrote its own"
        )
        job.process.terminate()
        assert job.wait() == 0, job.output()
        assert job.left_over() == []
    last = latest_checkpoint(workplace / "runs/default")
    assert steps_recorded(workplace / "runs/default") == list(range(1, last + 1))


def test_under_torchrun_all_ranks_of_a_second_job_end(workplace: Path) -> None:
    (workplace / "runs/default").mkdir(parents=True)
    with RunLock(workplace / "runs/default/lock"):
        job = finished(workplace, [*TORCHRUN_2, "train", *TINY, "parallelism=cp2", "train.steps=2"], quick=True)
    assert job.process.returncode == 1
    err = job.err.read_text()
    assert err.count("megatron-longctx train: ") == 1 and f"process {os.getpid()}, since " in err
    assert not (workplace / "runs/default/resolved.yaml").exists()
    assert job.left_over() == []


@pytest.fixture
def no_ranks(
    workplace: Path, no_start: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """A function that trains with `TINY` and settings, which must be refused without starting ranks or writing files.
    It returns standard error."""
    monkeypatch.chdir(workplace)

    def run(*words: str) -> str:
        before = sorted(workplace.rglob("*"))
        capsys.readouterr()
        assert cli.main(["train", *TINY, *words]) == 2
        assert sorted(workplace.rglob("*")) == before, "files were written"
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1 and captured.err.startswith("megatron-longctx train: ")
        return captured.err.removeprefix("megatron-longctx train: ").rstrip()

    return run


def test_the_fixture_notices_ranks(no_ranks: Callable[..., str]) -> None:
    with pytest.raises(AssertionError, match="ranks were started"):
        no_ranks()


PEER_SUMS = ["reduction.transport=peer", "reduction.output_projection=int8", "reduction.in_training=true"]


def test_missing_dataset(no_ranks: Callable[..., str]) -> None:
    err = no_ranks("data.prefix=data/gone")
    assert err == (
        "data.prefix=data/gone: expected the files data/gone.idx and .bin; data/gone.idx is missing. "
        "Write it with `megatron-longctx data`, or set data.prefix to another."
    )
    assert no_ranks("data.prefix=0.5 a 0.5").endswith("or more: data.prefix='0.7 data/a 0.3 data/b'.")
    assert no_ranks("data.prefix=data/x.bin").endswith("Leave the ending out: data.prefix=data/x.")


@pytest.mark.parametrize(
    ("words", "given", "expected", "remedy"),
    [
        (["attention.kernel=cudnn"], "attention.kernel=cudnn", "only 'cuda'", "Set attention.kernel to one of cpu,"),
        (["attention.kernel=none"], "attention.kernel=none", "one of auto, cpu, cudnn,", "Set attention.kernel"),
        (PEER_SUMS, "reduction.transport=peer", "auto or collective on CPUs", "Only GPUs"),
        (["train.device=cuda"], "train.device=cuda", "a CUDA device here", "Set train.device=cpu"),
        (["data.seq_length=900000"], "data.seq_length=900000", "at most ", "Lower data.seq_length"),
        (["data.tokenizer=huggingface", "data.tokenizer_path=x"], "data.tokenizer=huggingface", "byte-level", "Write"),
        (["train.num_processes=3", "parallelism=cp2"], "world size=3", "a multiple of", "Start that many ranks"),
        (["parallelism.data_parallel_size=2"], "train.global_batch_size=1", "1 x 2", "Nearest: 2."),
    ],
)
def test_settings_that_cannot_run_here(
    no_ranks: Callable[..., str], words: list[str], given: str, expected: str, remedy: str
) -> None:
    err = no_ranks(*words)
    assert err.startswith(f"{given}: expected ") and expected in err and remedy in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="TransformerEngine may be installed")
def test_missing_transformer_engine(no_ranks: Callable[..., str]) -> None:
    err = no_ranks("model.implementation=transformer_engine")
    assert err.startswith("model.implementation") and "No module named 'transformer_engine'" in err
    assert "set model.implementation=local" in err


def test_a_run_root_that_cannot_be_written(workplace: Path, no_ranks: Callable[..., str]) -> None:
    (workplace / "file").write_text("")
    assert no_ranks("run.root=file") == (
        "run.root=file: expected to be able to write file/default (Not a directory). "
        "Set run.root to a folder of yours on a disk with space."
    )


@pytest.mark.parametrize("name", ["resolved.yaml", "log.txt"])
def test_a_run_folder_that_cannot_be_written(workplace: Path, no_ranks: Callable[..., str], name: str) -> None:
    run = workplace / "runs/default"
    (run / "checkpoints").mkdir(parents=True)
    (run / name).mkdir()
    (run / "lock").touch()
    err = no_ranks()
    assert err.startswith("run.root=runs: expected to be able to write runs/default (Is a directory).")


def test_a_log_that_rank_0_cannot_open_is_the_recorded_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_config([*TINY, f"run.root={tmp_path}"])
    folder = RunFolder.of(config)
    folder.log.mkdir(parents=True)
    monkeypatch.setattr(launcher.dist, "get_rank", lambda: 0)
    with pytest.raises(IsADirectoryError):
        launcher.run(launcher.Job(config, 1, "cpu", None, None, {}))
    assert "rank 0 failed: IsADirectoryError: " in str(folder.first_error())


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_slurm_step_without_the_address_of_rank_0(
    no_ranks: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for key, value in step.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(name)
    assert no_ranks().startswith(f"{name}=: expected ")
