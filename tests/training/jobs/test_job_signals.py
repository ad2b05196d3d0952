"""TERM, USR1, HUP and INT write a checkpoint and stop; the same command resumes; no process is left."""

import os
import pty
import re
import signal
from pathlib import Path

import pytest

from megatron_longctx.cli import cli
from megatron_longctx.training import launcher
from megatron_longctx.training.signals import handled_signals
from tests.shared.jobs import (
    CLI,
    PATIENCE_S,
    TINY,
    TORCHRUN_2,
    Job,
    clean_environment,
    free_port,
    latest_checkpoint,
    started,
    steps_recorded,
)
from tests.shared.processes import SLOW_START, Quick

STEPS = 40_000  # enough that even a test delayed by minutes stops the run before its end


def line(step: int) -> str:
    """Return the beginning of a step's line in the log."""
    return f"step {step:>{len(str(STEPS))}}/"


def command(*more: str) -> list[str]:
    return [*CLI, "train", *TINY, "parallelism=cp2", f"train.steps={STEPS}", *more]


def first_step(job: Job) -> int:
    found = re.search(r" step +(\d+)/", job.out.read_text())
    assert found, job.output()
    return int(found.group(1))


def checked_stop(job: Job, run: Path, start: int) -> int:
    """Check a signalled job, and return the step at which it stopped."""
    assert job.wait() == 0, job.output()
    last = latest_checkpoint(run)
    assert start < last < STEPS, "the signal came too late to test anything" if last == STEPS else job.output()
    assert first_step(job) == start + 1, "it did not resume at the step where it stopped"
    assert steps_recorded(run) == list(range(1, last + 1))
    out = job.out.read_text()
    assert f"stopped at step {last} of {STEPS}: the same command goes on from here" in out
    assert job.err.read_text() == ""
    assert job.left_over() == []
    return last


def test_signals_before_the_ranks_handle_them_stay_pending(workplace: Path) -> None:
    with started(workplace, command(), clean_environment(**{SLOW_START: "2"}), quick=True) as job:
        job.wait_for("starting 2 cpu ranks")
        job.process.send_signal(signal.SIGUSR1)
        job.wait_for("transformer layers")
        job.process.send_signal(signal.SIGUSR1)  # twice, as Slurm and its scripts may
        assert job.wait() == 0, job.output()
        assert f"stopped at step 0 of {STEPS}" in job.out.read_text()
        assert job.left_over() == []
    assert not list((workplace / "runs/default/checkpoints").iterdir())


def test_usr2_writes_a_checkpoint_and_training_goes_on(workplace: Path) -> None:
    with started(workplace, command(), clean_environment(), quick=True) as job:
        job.wait_for(line(2))
        job.process.send_signal(signal.SIGUSR2)
        job.wait_for("saved runs/default/checkpoints/iter_")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 0, job.output()
        assert job.left_over() == []
    assert len(list((workplace / "runs/default/checkpoints").glob("iter_*"))) == 2


def test_usr2_does_not_end_a_job_that_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "train", lambda *_: signal.raise_signal(signal.SIGUSR2))
    monkeypatch.setattr(cli, "check_datasets", lambda _: None)
    before = signal.signal(signal.SIGUSR2, lambda number, _: pytest.fail("it would end the process"))
    try:
        assert cli.main(["train"]) == 0
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_second_interrupt_ends_the_job_immediately(workplace: Path) -> None:
    words, slowly = command("train.save=false"), clean_environment(**{SLOW_START: str(PATIENCE_S)})
    with started(workplace, words, slowly, quick=True) as job:
        job.wait_for("starting 2 cpu ranks")
        job.process.send_signal(signal.SIGINT)
        job.wait_for("interrupted: stopping after this step without a checkpoint (train.save=false)")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.output()
        assert job.err.read_text() == "megatron-longctx train: interrupted\n"
        assert job.left_over() == []


def test_a_closed_terminal_stops_the_job_with_a_checkpoint(workplace: Path) -> None:
    """All processes receive HUP, and their output fails from then on."""
    ours, theirs = pty.openpty()
    process = Quick(command()[len(CLI) :], workplace, (os.ttyname(theirs),) * 3, clean_environment())
    try:
        out = b""
        while line(2).encode() not in out:
            out += os.read(ours, 1000)
        os.close(theirs)
        os.close(ours)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
    assert 2 <= latest_checkpoint(workplace / "runs/default") < STEPS
    assert not (workplace / "runs/default/errors").exists()


def test_nohup_is_respected() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in handled_signals() and len(handled_signals()) == 3
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in handled_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("moment", ["starting 2 cpu ranks", line(2)])
def test_killing_the_launcher_leaves_no_ranks(workplace: Path, moment: str) -> None:
    # Ranks are forks: the second inherits the first one's pipe to the launcher.
    with started(workplace, command(), quick=moment.startswith("step")) as job:
        job.wait_for(moment)
        while len(job.ranks()) < 2:
            assert job.process.poll() is None, job.output()
        job.remember()
        job.process.kill()
        job.wait()
        assert job.left_over() == [], "ranks outlive the launcher"
    run = workplace / "runs" / "default"
    if moment.startswith("step"):
        assert 2 <= latest_checkpoint(run) < STEPS, "the ranks stop as for any signal"
    elif (run / "metrics.jsonl").exists():
        assert len(steps_recorded(run)) < 100, "orphans train on"


def test_under_torchrun_usr1_writes_a_checkpoint_and_ends_with_success(workplace: Path) -> None:
    """USR2 to one rank writes one before, and training goes on."""
    settings = command()[len(CLI) :]
    with started(workplace, [*TORCHRUN_2, *settings], quick=True) as job:
        job.wait_for(line(2))
        job.ranks()[-1].send_signal(signal.SIGUSR2)
        job.wait_for("saved runs/default/checkpoints/iter_")
        for rank in job.ranks():
            rank.send_signal(signal.SIGUSR1)
        last = checked_stop(job, workplace / "runs/default", 0)
    with started(workplace, [*TORCHRUN_2, *settings], quick=True) as job:
        job.wait_for(line(last + 2))
        job.process.terminate()  # torchrun forwards it and then fails itself
        job.wait()
        assert first_step(job) == last + 1
        stopped = latest_checkpoint(workplace / "runs/default")
        assert last < stopped < STEPS
        assert steps_recorded(workplace / "runs/default") == list(range(1, stopped + 1))
        assert "Traceback" not in job.out.read_text()
        assert job.left_over() == []


def test_tasks_of_a_slurm_step_find_each_other_and_stop_on_term(workplace: Path) -> None:
    port = str(free_port())

    def task(rank: int) -> dict[str, str]:
        return clean_environment(
            SLURM_STEP_ID="0",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )

    with (
        started(workplace, command(), task(0), quick=True) as first,
        started(workplace, command(), task(1), quick=True) as second,
    ):
        first.wait_for(line(2))
        assert first.listening() == second.listening() == {"127.0.0.1"}
        os.kill(first.process.pid, signal.SIGTERM)
        os.kill(second.process.pid, signal.SIGTERM)
        assert second.wait() == 0, second.output()
        checked_stop(first, workplace / "runs/default", 0)
        assert second.output().split() == ["---", "standard", "error"], "only rank 0 prints"
