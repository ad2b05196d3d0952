"""The launch scripts: syntax, the command lines they build, and the signal → checkpoint → requeue path.

`srun` and `scontrol` are small stand-ins on PATH (there is no Slurm to test with); they and the command that the
scripts end in only record how they were called, and wait for a signal where a test says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.shared.jobs import PATIENCE_S

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted(p for p in LAUNCH.iterdir() if p.suffix in (".sh", ".sbatch"))

SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$RECORD"
if [[ $1 == show ]]; then printf 'node-a\\nnode-b\\n'; fi
"""
# On USR1 or TERM it ends with $ON_SIGNAL, as srun does when all tasks have ended; the sleep runs beside it, since a
# shell handles signals only between commands.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$RECORD.srun"
echo "$MASTER_ADDR $MASTER_PORT $TORCH_NCCL_ASYNC_ERROR_HANDLING" >"$RECORD.environment"
for name in USR1 TERM; do trap "echo srun got $name >>$RECORD; kill \\$sleeper; exit $ON_SIGNAL" $name; done
if [[ -n "${ON_SIGNAL:-}" ]]; then sleep 60 & sleeper=$!; touch "$RECORD.ready"; wait; fi
exit "${EXIT_CODE:-0}"
"""
COMMAND = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$RECORD"
exit "${EXIT_CODE:-0}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a two-node job whose PATH has the stand-ins first."""
    commands = tmp_path / "venv" / "bin"
    commands.mkdir(parents=True)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("megatron-longctx", COMMAND), ("torchrun", COMMAND)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER_", "VIRTUAL"))}
    return inherited | {
        "VENV": str(tmp_path / "venv"),
        "RECORD": str(tmp_path / "record"),
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_CPUS_PER_TASK": "12",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }


def start(script: str, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output


def recorded(environment: dict[str, str], suffix: str = "") -> list[str]:
    path = Path(environment["RECORD"] + suffix)
    return path.read_text().splitlines() if path.exists() else []


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear within 60 s"
        time.sleep(0.02)


def interrupt(environment: dict[str, str], number: int, *arguments: str) -> tuple[int, str]:
    """Start the job, signal the batch script once its step runs, and wait for it."""
    process = start("train.sbatch", environment, *arguments)
    wait_for(Path(environment["RECORD"] + ".ready"))
    process.send_signal(number)
    return finish(process)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_syntax(script: Path) -> None:
    result = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    result = subprocess.run(["shellcheck", "--shell=bash", str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_sbatch_options_come_before_the_first_command() -> None:
    lines = (LAUNCH / "train.sbatch").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options and max(options) < first_command  # Slurm stops reading options there
    text = "\n".join(lines[i] for i in options)
    assert "--signal=B:USR1@" in text and "--requeue" in text and "--open-mode=append" in text


@pytest.mark.parametrize(("own", "address"), [({}, "127.0.0.1"), ({"MASTER_ADDR": "node-a-ib"}, "node-a-ib")])
def test_ranks_of_one_node_meet_on_loopback_unless_told_otherwise(
    environment: dict[str, str], own: dict[str, str], address: str
) -> None:
    (Path(environment["VENV"]) / "bin/scontrol").write_text("#!/usr/bin/env bash\necho node-a\n")
    code, output = finish(start("train.sbatch", environment | own, "experiment=demo"))
    assert code == 0, output
    assert recorded(environment, ".environment") == [f"{address} {20000 + 12345 % 12000} 1"]


def test_srun_mode_starts_one_training_process_for_each_task(environment: dict[str, str]) -> None:
    arguments = ("experiment=demo", "run.name=two words", "train.steps=5")
    code, output = finish(start("train.sbatch", environment | {"SRUN_ARGS": "--label --mpi=none"}, *arguments))
    assert code == 0, output
    assert recorded(environment, ".srun") == [
        "--kill-on-bad-exit=1",
        "--cpus-per-task=12",
        "--label",
        "--mpi=none",
        "megatron-longctx",
        "train",
        *arguments,
    ]
    assert recorded(environment, ".environment") == [f"node-a {20000 + 12345 % 12000} 1"]
    assert recorded(environment) == ["scontrol show hostnames node-[a-b]"]  # and no requeue


def test_torchrun_mode_starts_one_agent_a_node(environment: dict[str, str]) -> None:
    code, output = finish(start("train.sbatch", environment | {"LAUNCH": "torchrun"}, "experiment=demo"))
    assert code == 0, output
    words = recorded(environment, ".srun")
    assert words[:5] == ["--kill-on-bad-exit=1", "--cpus-per-task=12", "--ntasks=2", "--ntasks-per-node=1", "bash"]
    port = 20000 + 12345 % 12000
    assert words[words.index("torchrun") :] == [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=gpu",
        "--rdzv-id=12345",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=node-a:{port}",
        "--no-python",
        "megatron-longctx",
        "train",
        "experiment=demo",
    ]


def test_failure_of_training_is_the_jobs_failure(environment: dict[str, str]) -> None:
    code, _ = finish(start("train.sbatch", environment | {"EXIT_CODE": "7"}))
    assert code == 7
    assert not any("requeue" in line for line in recorded(environment))


@pytest.mark.parametrize("step_code", [0, 138])
def test_usr1_reaches_training_and_the_job_requeues(environment: dict[str, str], step_code: int) -> None:
    code, output = interrupt(environment | {"ON_SIGNAL": str(step_code)}, signal.SIGUSR1, "experiment=demo")
    assert code == 0, output
    assert recorded(environment)[1:] == ["srun got USR1", "scontrol requeue 12345"]


def test_failure_while_checkpointing_is_not_requeued(environment: dict[str, str]) -> None:
    code, output = interrupt(environment | {"ON_SIGNAL": "3"}, signal.SIGUSR1)
    assert code == 3 and "not requeueing" in output
    assert recorded(environment)[1:] == ["srun got USR1"]


def test_requeueing_ends_some_time(environment: dict[str, str]) -> None:
    spent = {"ON_SIGNAL": "0", "SLURM_RESTART_COUNT": "2", "MAX_REQUEUES": "2"}
    code, output = interrupt(environment | spent, signal.SIGUSR1)
    assert code == 1 and "already requeued 2 times" in output
    assert recorded(environment)[1:] == ["srun got USR1"]


def test_term_reaches_training_and_does_not_requeue(environment: dict[str, str]) -> None:
    code, output = interrupt(environment | {"ON_SIGNAL": "0"}, signal.SIGTERM)
    assert code == 0, output
    assert recorded(environment)[1:] == ["srun got TERM"]


def test_unknown_launch_mode_is_refused(environment: dict[str, str]) -> None:
    code, output = finish(start("train.sbatch", environment | {"LAUNCH": "mpirun"}))
    assert code == 2 and "LAUNCH=mpirun: expected srun or torchrun" in output


def test_relay_passes_usr1_to_the_ranks_of_a_real_torchrun(environment: dict[str, str], tmp_path: Path) -> None:
    finish(start("train.sbatch", environment | {"LAUNCH": "torchrun"}))
    text = Path(environment["RECORD"] + ".srun").read_text()
    relay = text[text.index("bash\n-c\n") + len("bash\n-c\n") : text.index("\nrelay\ntorchrun\n")]
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, pathlib, signal, sys, time\n"
        "name = pathlib.Path(sys.argv[1]) / os.environ['RANK']\n"
        "def stop(*_):\n"
        "    name.with_suffix('.saved').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, stop)\n"
        "name.with_suffix('.ready').touch()\n"
        "time.sleep(60)\n"
        "sys.exit(9)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(rank)]
    process = subprocess.Popen(["bash", "-c", relay, "relay", *torchrun, str(tmp_path)], start_new_session=True)
    try:
        for number in (0, 1):
            wait_for(tmp_path / f"{number}.ready")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=PATIENCE_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended, as they should
            os.killpg(process.pid, signal.SIGKILL)
    assert all((tmp_path / f"{number}.saved").exists() for number in (0, 1))


def test_local_passes_arguments_and_exit_code(environment: dict[str, str]) -> None:
    code, output = finish(start("local.sh", environment | {"EXIT_CODE": "5"}, "experiment=demo", "train.steps=3"))
    assert code == 5, output
    assert recorded(environment) == ["megatron-longctx train experiment=demo train.steps=3"]


def test_local_can_use_torchrun(environment: dict[str, str]) -> None:
    code, output = finish(start("local.sh", environment | {"TORCHRUN": "1", "NPROC": "4"}, "experiment=demo"))
    assert code == 0, output
    expected = "torchrun --standalone --nproc-per-node=4 --no-python megatron-longctx train experiment=demo"
    assert recorded(environment) == [expected]


def test_local_refuses_a_missing_environment(environment: dict[str, str], tmp_path: Path) -> None:
    code, output = finish(start("local.sh", environment | {"VENV": str(tmp_path / "gone")}))
    assert code == 2 and "expected a virtual environment" in output
