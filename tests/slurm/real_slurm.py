"""The launch scripts on a real Slurm: `make test-slurm`. No part of `make test`: it needs Slurm's daemons and minutes.

Every run trains the demo recipe, made tiny. Runs that were stopped, requeued or robbed of a node must have the losses
of the one that was not, to the last bit.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_longctx.config.environment import commit
from megatron_longctx.training.rendezvous import interface_to
from tests.shared.jobs import CLI, clean_environment
from tests.slurm.cluster import Cluster, cluster, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")

ROOT = Path(__file__).resolve().parents[2]
CPU = ("--gpus-per-node=0", "--cpus-per-task=1")
TINY = (
    *("experiment=demo", "data.prefix=data/tiny", "data.seq_length=64", "logging.wandb=disabled"),
    *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "optim.warmup_steps=1"),
)
STEPS = 120
PATIENCE_S = 1800.0  # a hang; how long a run takes is the machine's affair


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster(4) as made:
        made.environment.update(
            {k: v for k, v in clean_environment().items() if k in ("OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE")},
            PYTHONPATH=str(ROOT),
            VENV=str(made.folder / "venv"),
        )
        made.environment["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # torchrun
        command = made.folder / "venv/bin/megatron-longctx"  # this checkout's, however the package is installed
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m megatron_longctx "$@"\n')
        command.chmod(0o755)
        if not made.namespaces:  # all nodes are this host, and its name may be loopback
            made.environment.update(MASTER_ADDR=made.address, GLOO_SOCKET_IFNAME=interface_to(made.address))
        text = made.folder / "text"
        text.mkdir()
        for number in range(4):
            lines = "".join(f"line {i} of file {number}: {i * i + number}\n" for i in range(400))
            (text / f"{number}.txt").write_text(lines)
        made.command(*CLI, "data", "--source=text", "--out=data/tiny", "--glob=*.txt")
        yield made


class Run:
    """A job that was submitted, and the run that it trains."""

    def __init__(self, slurm: Cluster, name: str, *words: str, script: str = "train", **environment: str) -> None:
        """words: options of sbatch, and settings."""
        self.slurm, self.path = slurm, slurm.folder / "runs" / name
        options = [word for word in words if word.startswith("-")]
        settings = [word for word in words if not word.startswith("-")]
        self.log = slurm.folder / f"{name}.log"
        command = ["sbatch", "--parsable", f"--output={self.log}", *CPU, *options]
        script = str(ROOT / f"launch/{script}.sbatch")
        given = [*TINY, f"train.steps={STEPS}", f"run.name={name}", *settings]
        self.job = slurm.command(*command, script, *given, **environment)

    @property
    def state(self) -> str:
        return self.slurm.field_of(self.job, "JobState")

    @property
    def restarts(self) -> int:
        return int(self.slurm.field_of(self.job, "Restarts"))

    def output(self) -> str:
        log = self.log.read_text() if self.log.exists() else ""
        return f"{self.slurm.command('scontrol', 'show', 'job', self.job)}\n{log}"

    def wait_for(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            alive = self.state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
            assert alive or true(), f"no {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {what} in time:\n{self.output()}"
            time.sleep(0.1)

    def ended(self) -> str:
        """State and exit code, once it has ended."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "PREEMPTED")
        self.wait_for(lambda: self.state in states, "end")
        return f"{self.state} {self.slurm.field_of(self.job, 'ExitCode')}"

    def records(self) -> list[dict[str, float]]:
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def at_step(self, step: int) -> None:
        self.wait_for(lambda: len(self.records()) >= step, f"step {step}")

    def saves_and_goes_on(self) -> None:
        """Ask for a checkpoint now, before any other one, and wait until training has gone on from it."""
        self.slurm.command("scancel", "--signal=USR2", self.job)
        latest = self.path / "checkpoints/latest_checkpointed_iteration.txt"
        self.wait_for(latest.exists, "checkpoint")
        self.at_step(int(latest.read_text()) + 2)

    def status(self) -> dict[str, object]:
        path = self.path / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def curve(self) -> list[tuple[float, float, float]]:
        return [(r["train/step"], r["train/loss"], r["train/grad_norm"]) for r in self.records()]


@pytest.fixture(scope="module")
def whole(slurm: Cluster) -> list[tuple[float, float, float]]:
    """The losses of the run that nothing happens to: 4 ranks on one node."""
    run = Run(slurm, "whole", "--nodes=1", "--ntasks-per-node=4")
    assert run.ended() == "COMPLETED 0:0", run.output()
    assert [step for step, _, _ in run.curve()] == list(range(1, STEPS + 1))
    assert run.status()["state"] == "complete" and run.status()["job"] == run.job
    return run.curve()


def test_the_limits_signal_requeues_and_the_run_goes_on(slurm: Cluster, whole: list[tuple[float, ...]]) -> None:
    run = Run(slurm, "limit", "--nodes=2", "--ntasks-per-node=2", "train.save_interval=null")
    run.at_step(5)
    run.saves_and_goes_on()
    slurm.command("scancel", "--batch", "--signal=USR1", run.job)  # as `--signal=B:USR1@300` does
    assert run.ended() == "COMPLETED 0:0", run.output()
    assert run.restarts == 1 and "requeueing job" in run.output()
    assert run.status()["began"] in range(5, STEPS), "it began again"
    assert run.curve() == whole


def test_a_lost_node_does_not_hang_the_job_which_goes_on_without_it(
    slurm: Cluster, whole: list[tuple[float, ...]]
) -> None:
    run = Run(slurm, "lost", "--nodes=4", "--ntasks-per-node=1", "train.save_interval=5")
    run.wait_for(lambda: int(str(run.status().get("saved", 0))) >= 5, "checkpoint")
    lost = slurm.nodes[-1]
    slurm.lose(lost)
    try:
        run.wait_for(lambda: run.restarts == 1, "requeue")
    finally:
        slurm.start(lost)
    assert run.ended() == "COMPLETED 0:0", run.output()
    assert run.status()["began"] in range(5, STEPS)
    assert run.curve() == whole


def test_a_stopped_run_is_no_success_for_those_that_wait_for_it(slurm: Cluster) -> None:
    """Under torchrun, whose agents have exit codes of their own."""
    words = ("--nodes=2", "--ntasks-per-node=1", "parallelism=cp2", "train.save_interval=null")
    run = Run(slurm, "stopped", *words, LAUNCH="torchrun", NPROC="1")
    after = slurm.command("sbatch", "--parsable", f"--dependency=afterok:{run.job}", "--wrap=true")
    run.at_step(5)
    run.saves_and_goes_on()
    slurm.command("scancel", "--signal=TERM", run.job)
    assert run.ended() == "FAILED 75:0", run.output()
    assert run.status()["state"] == "stopped" and run.status()["signal"] == "SIGTERM"
    assert int((run.path / "checkpoints/latest_checkpointed_iteration.txt").read_text()) == len(run.records()) < STEPS
    deadline = time.monotonic() + 60
    while slurm.field_of(after, "Reason") != "DependencyNeverSatisfied":
        assert time.monotonic() < deadline, slurm.command("scontrol", "show", "job", after)
        time.sleep(0.5)
    slurm.command("scancel", after)


ONE = ("--ntasks-per-node=1", "parallelism=single", "train.steps=400", "train.global_batch_size=1")


def test_a_preempted_job_is_requeued_and_goes_on(slurm: Cluster) -> None:
    run = Run(slurm, "preempted", *ONE)
    run.at_step(5)
    urgent = ("sbatch", "--wait", "--partition=high", "--nodes=4", "--exclusive", "--wrap=true")
    slurm.command(*urgent)
    assert run.ended() == "COMPLETED 0:0", run.output()
    assert run.restarts == 1 and "train.sbatch: preempted" in run.output()
    assert [step for step, _, _ in run.curve()] == list(range(1, 401))


def test_one_task_of_a_sweep_is_requeued_alone(slurm: Cluster) -> None:
    words = [*TINY, "parallelism=single", "train.steps=400", "optim.lr=1e-3,2e-3", "run.name=sweep"]
    options = (*CPU, "--ntasks-per-node=1", "--parsable")
    said = slurm.command(*CLI, "submit", "sweep", *options, *words)
    array = said.splitlines()[0]
    runs = [slurm.folder / "runs" / f"sweep-{rate}" for rate in ("0.001", "0.002")]
    tasks = [_Task(slurm, f"{array}_{i}", run) for i, run in enumerate(runs, start=1)]
    tasks[1].at_step(5)
    slurm.command("scancel", "--batch", "--signal=USR1", tasks[1].job)
    assert [task.ended() for task in tasks] == ["COMPLETED 0:0"] * 2
    assert [task.restarts for task in tasks] == [0, 1]
    for task in tasks:
        assert [step for step, _, _ in task.curve()] == list(range(1, 401))
        assert json.loads((task.path / "environment.json").read_text())["commit"] == commit()


class _Task(Run):
    """A task of an array that `submit` has submitted."""

    def __init__(self, slurm: Cluster, job: str, path: Path) -> None:
        self.slurm, self.job, self.path = slurm, job, path
        array, _, number = job.partition("_")
        self.log = path.parent / "sweep" / f"slurm-{array}_{number}.log"


def test_a_refusal_is_one_line_and_exit_code_2_and_too_short_a_limit_ends_the_job(slurm: Cluster) -> None:
    refused = Run(slurm, "refused", "--nodes=2", "--ntasks-per-node=2", "parallelism=cp8")
    short = Run(slurm, "short", *ONE)
    short.wait_for(lambda: short.state == "RUNNING" and short.log.exists() and short.log.stat().st_size > 0, "start")
    slurm.command("scancel", "--batch", "--signal=USR1", short.job)
    assert refused.ended() == "FAILED 2:0", refused.output()
    assert refused.log.read_text().count("expected") == 1 and "srun --kill" not in refused.output()
    assert short.ended() == "FAILED 1:0", short.output()
    assert "raise --time" in short.output() and short.restarts == 0


def test_a_server_over_several_tasks_answers_and_is_requeued(slurm: Cluster, whole: list[tuple[float, ...]]) -> None:
    log = slurm.folder / "serve.log"
    options = ("sbatch", "--parsable", f"--output={log}", *CPU, "--ntasks-per-node=2")
    words = ("checkpoint=runs/whole", "parallelism.context_parallel_size=2", "serve.port=8765")
    server = _Task(
        slurm, slurm.command(*options, str(ROOT / "launch/serve.sbatch"), *words), slurm.folder / "runs/whole"
    )
    server.log = log
    server.wait_for(lambda: log.exists() and "serving whole at http://127.0.0.1:8765/v1" in log.read_text(), "server")
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8765/v1/models', timeout=60).read().decode())"
    inside = ("srun", f"--jobid={server.job}", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1")
    assert '"whole"' in slurm.command(*inside, sys.executable, "-c", ask)
    slurm.command("scancel", "--batch", "--signal=USR1", server.job)
    server.wait_for(lambda: server.restarts == 1, "requeue")
    slurm.command("scancel", server.job)
