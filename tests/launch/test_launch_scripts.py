"""The launch scripts: syntax, the command lines they build, and the path from signal to checkpoint to requeue.

Fakes of `srun`, `scontrol` and the final command on PATH record their arguments and, in some tests, wait for a signal.
tests/slurm runs the scripts on a real Slurm.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.shared.jobs import PATIENCE_S

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted(p for p in LAUNCH.iterdir() if p.suffix in (".sh", ".sbatch") or p.name == "submit")
SOURCED = ("env.sh", "job.sh")

SCONTROL = """#!/usr/bin/env bash
case "$*" in
"show hostnames"*) printf '%s\\n' $NODES ;;
"show job"*) printf ' StartTime=2026-01-01T00:00:00 EndTime=x\\n PreemptTime=%s\\n Command=%s\\n' \\
    "${PREEMPTED:-None}" "$COMMAND" ;;
*) echo "scontrol $*" >>"$RECORD" ;;
esac
"""
# The first step is the preflight check, the second runs the ranks. On USR1 or TERM these end with $ON_SIGNAL, as srun
# does when all tasks have ended. The sleep runs in the background: a shell handles signals only between commands.
SRUN = """#!/usr/bin/env bash
if [[ "$*" == *--preflight* ]]; then
    printf '%s\\n' "$@" >"$RECORD.preflight"
    echo "run folder: $FOLDER"
    exit "${PREFLIGHT:-0}"
fi
if [[ "${*: -1}" == true ]]; then exit "${NODE_LOST:-0}"; fi
printf '%s\\n' "$@" >"$RECORD.srun"
echo "$MASTER_ADDR $MASTER_PORT $TORCH_NCCL_ASYNC_ERROR_HANDLING" >"$RECORD.environment"
status() { printf '{\\n "state": "%s",\\n "step": %s,\\n "began": 4,\\n "job": "12345",\\n "restart": %s\\n}\\n' \\
    "$1" "$2" "${SLURM_RESTART_COUNT:-null}" >"$FOLDER/status.json"; }
for name in USR1 TERM; do trap "echo srun got $name >>$RECORD; status ${STATE:-stopped} ${STEP:-9}
    kill \\$sleeper; exit $ON_SIGNAL" $name; done
if [[ -n "${ON_SIGNAL:-}" ]]; then sleep 60 & sleeper=$!; touch "$RECORD.ready"; wait; fi
status "${STATE:-complete}" "${STEP:-9}"
exit "${EXIT_CODE:-0}"
"""
COMMAND = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$RECORD"
exit "${EXIT_CODE:-0}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of a two-node job, with the fakes first on PATH."""
    commands = tmp_path / "venv" / "bin"
    commands.mkdir(parents=True)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("megatron-longctx", COMMAND), ("torchrun", COMMAND)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MASTER_", "VIRTUAL"))}
    return inherited | {
        "VENV": str(tmp_path / "venv"),
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "RECORD": str(tmp_path / "record"),
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "NODES": "node-a node-b",
        "COMMAND": str(LAUNCH / "train.sbatch"),
        "FOLDER": str(tmp_path),
        "SLURM_NTASKS": "16",
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
    assert ("set -euo pipefail" in script.read_text()) == (script.name not in SOURCED)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", ["train", "sweep", "serve"])
def test_sbatch_options_come_before_the_first_command(script: str) -> None:
    lines = (LAUNCH / f"{script}.sbatch").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options and max(options) < first_command  # Slurm stops reading options there
    text = "\n".join(lines[i] for i in options)
    assert "--signal=B:USR1@" in text and "--requeue" in text and "--open-mode=append" in text


@pytest.mark.parametrize(("own", "address"), [({}, "127.0.0.1"), ({"MASTER_ADDR": "node-a-ib"}, "node-a-ib")])
def test_ranks_of_one_node_use_loopback_by_default(
    environment: dict[str, str], own: dict[str, str], address: str
) -> None:
    code, output = finish(start("train.sbatch", environment | {"NODES": "node-a"} | own, "experiment=demo"))
    assert code == 0, output
    assert recorded(environment, ".environment") == [f"{address} {20000 + 12345 % 12000} 1"]


def test_srun_mode_starts_one_training_process_per_task(environment: dict[str, str]) -> None:
    arguments = ("experiment=demo", "run.name=two words", "train.steps=5")
    code, output = finish(start("train.sbatch", environment | {"SRUN_ARGS": "--label --mpi=none"}, *arguments))
    assert code == 0, output
    assert recorded(environment, ".srun") == [
        *("--kill-on-bad-exit=1", "--cpus-per-task=12", "--label", "--mpi=none", "megatron-longctx", "train"),
        *arguments,
    ]
    assert recorded(environment, ".environment") == [f"node-a {20000 + 12345 % 12000} 1"]
    assert recorded(environment) == []  # no requeue
    assert recorded(environment, ".preflight") == [
        *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--nodelist=node-a", "--label", "--mpi=none"),
        *("megatron-longctx", "train", "--preflight", "16", *arguments),
    ]


def test_a_refused_job_ends_before_ranks_start(environment: dict[str, str]) -> None:
    code, _ = finish(start("train.sbatch", environment | {"PREFLIGHT": "2"}, "experiment=demo"))
    assert code == 2
    assert recorded(environment, ".srun") == recorded(environment) == []


def test_torchrun_mode_starts_one_agent_per_node(environment: dict[str, str]) -> None:
    code, output = finish(start("train.sbatch", environment | {"LAUNCH": "torchrun", "NPROC": "8"}, "experiment=demo"))
    assert code == 0, output
    words = recorded(environment, ".srun")
    assert words[:5] == ["--kill-on-bad-exit=1", "--cpus-per-task=12", "--ntasks=2", "--ntasks-per-node=1", "bash"]
    port = 20000 + 12345 % 12000
    assert words[words.index("torchrun") :] == [
        *("torchrun", "--nnodes=2", "--nproc-per-node=8", "--rdzv-id=12345", "--rdzv-backend=c10d"),
        *(f"--rdzv-endpoint=node-a:{port}", "--no-python", "megatron-longctx", "train", "experiment=demo"),
    ]


def test_torchrun_without_gpus_needs_the_number_of_ranks(environment: dict[str, str]) -> None:
    code, output = finish(start("train.sbatch", environment | {"LAUNCH": "torchrun"}))
    assert code == 2 and "expected NPROC" in output
    code, output = finish(start("train.sbatch", environment | {"LAUNCH": "torchrun", "SLURM_GPUS_ON_NODE": "8"}))
    assert code == 0 and "--nproc-per-node=8" in recorded(environment, ".srun"), output


def test_a_failure_of_training_fails_the_job(environment: dict[str, str]) -> None:
    code, _ = finish(start("train.sbatch", environment | {"EXIT_CODE": "7", "STATE": "failed"}))
    assert code == 7
    assert recorded(environment) == []


def test_a_lost_node_requeues_the_job(environment: dict[str, str]) -> None:
    lost = {"EXIT_CODE": "1", "STATE": "failed", "NODE_LOST": "1"}
    code, output = finish(start("train.sbatch", environment | lost))
    assert code == 0 and "a node is lost" in output
    assert recorded(environment) == ["scontrol requeue 12345"]


USR1, TERM = signal.SIGUSR1, signal.SIGTERM
ARRAY = {"SLURM_ARRAY_JOB_ID": "12300", "SLURM_ARRAY_TASK_ID": "3"}
PREEMPTED = {"PREEMPTED": "2026-01-01T00:01:00"}


@pytest.mark.parametrize(
    ("variables", "number", "code", "message", "action"),
    [
        ({}, USR1, 0, "requeueing job 12345", "scontrol requeue 12345"),
        (ARRAY, USR1, 0, "requeueing job 12300_3", "scontrol requeue 12300_3"),
        ({"ON_SIGNAL": "1"}, USR1, 0, "requeueing", "scontrol requeue 12345"),  # torchrun, whose ranks have stopped
        ({"ON_SIGNAL": "3", "STATE": "failed"}, USR1, 3, "failed while checkpointing, not requeueing", None),
        ({"ON_SIGNAL": "138", "STEP": "4"}, USR1, 1, "raise --time, or lower the seconds of --signal", None),
        ({"SLURM_RESTART_COUNT": "2", "MAX_REQUEUES": "2"}, USR1, 1, "already requeued 2 times", None),
        ({"STATE": "complete"}, USR1, 0, "the time limit is near", None),
        ({}, TERM, 75, "stopped by", None),
        (PREEMPTED, TERM, 0, "preempted", "scontrol requeue 12345"),
        ({"PREEMPTED": "2025-01-01T00:01:00"}, TERM, 75, "stopped by", None),  # before its last requeue
        (PREEMPTED | {"ON_SIGNAL": "143", "STATE": "starting"}, TERM, 0, "preempted", "scontrol requeue 12345"),
        (PREEMPTED | {"ON_SIGNAL": "5", "STATE": "failed"}, TERM, 5, "", None),
    ],
)
def test_signals(
    environment: dict[str, str], variables: dict[str, str], number: int, code: int, message: str, action: str | None
) -> None:
    ended, output = interrupt({"ON_SIGNAL": "0"} | environment | variables, number, "experiment=demo")
    assert ended == code and message in output, output
    assert recorded(environment) == [
        f"srun got {signal.Signals(number).name.removeprefix('SIG')}",
        *([action] if action else []),
    ]


def test_unknown_launch_mode_is_refused(environment: dict[str, str]) -> None:
    code, output = finish(start("train.sbatch", environment | {"LAUNCH": "mpirun"}))
    assert code == 2 and "LAUNCH=mpirun: expected srun or torchrun" in output


def test_relay_passes_usr1_to_the_ranks_of_a_real_torchrun(environment: dict[str, str], tmp_path: Path) -> None:
    finish(start("train.sbatch", environment | {"LAUNCH": "torchrun", "NPROC": "2"}))
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
        with contextlib.suppress(ProcessLookupError):  # all have ended, as expected
            os.killpg(process.pid, signal.SIGKILL)
    assert all((tmp_path / f"{number}.saved").exists() for number in (0, 1))


def test_a_task_of_a_sweep_trains_the_settings_of_its_line(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "runs.txt").write_text("experiment=demo run.name=a\nexperiment=demo 'run.name=two words'\n")
    task = environment | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    code, output = finish(start("sweep.sbatch", task, str(tmp_path / "runs.txt")))
    assert code == 0, output
    assert recorded(environment, ".srun")[-3:] == ["train", "experiment=demo", "run.name=two words"]
    code, output = finish(start("sweep.sbatch", task | {"SLURM_ARRAY_TASK_ID": "3"}, str(tmp_path / "runs.txt")))
    assert code == 2 and "has no line 3" in output
    code, output = finish(start("sweep.sbatch", environment, str(tmp_path / "runs.txt")))
    assert code == 2 and "expected an array" in output


@pytest.mark.parametrize(("number", "requeues"), [(USR1, True), (TERM, False)])
def test_a_server_is_requeued_at_the_time_limit(environment: dict[str, str], number: int, requeues: bool) -> None:
    process = start("serve.sbatch", environment | {"ON_SIGNAL": "0"}, "checkpoint=runs/first")
    wait_for(Path(environment["RECORD"] + ".ready"))
    process.send_signal(number)
    code, output = finish(process)
    assert code == 0, output
    assert recorded(environment, ".srun")[-3:] == ["megatron-longctx", "serve", "checkpoint=runs/first"]
    assert ("scontrol requeue 12345" in recorded(environment)) == requeues


@pytest.mark.parametrize(("verb", "own"), [("eval", []), ("data", ["--nodes=1", "--ntasks=1"])])
def test_another_verb_runs_on_every_task_or_in_one_process(
    environment: dict[str, str], verb: str, own: list[str]
) -> None:
    code, output = finish(start("run.sbatch", environment | {"EXIT_CODE": "3"}, verb, "a=1"))
    assert code == 3, output
    words = ["--kill-on-bad-exit=1", "--cpus-per-task=12", *own, "megatron-longctx", verb, "a=1"]
    assert recorded(environment, ".srun") == words and recorded(environment) == []


def test_the_image_has_existing_files_and_the_pinned_kernels() -> None:
    text = (LAUNCH / "container/Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert {line[0] for line in lines} <= {"ARG", "FROM", "RUN", "COPY", "ENV", "CMD"} and lines[1][0] == "FROM"
    copied = [name for line in lines if line[0] == "COPY" for name in line[1:-1]]
    assert copied and all((LAUNCH.parent / name).exists() for name in copied)
    (pinned,) = re.findall(r'"(flash-attn-4==[\w.]+)"', (LAUNCH.parent / "pyproject.toml").read_text())
    assert text.split().count(pinned) == 1


def test_users_can_override_every_default_variable(environment: dict[str, str]) -> None:
    names = re.findall(r"^default (\w+) (\w+)$", (LAUNCH / "env.sh").read_text(), re.MULTILINE)
    assert len(names) >= 3
    for own in ({}, {name: "mine" for name, _ in names}):
        script = f'. "{LAUNCH}/env.sh"; printf "%s\\n" ' + " ".join(f'"${name}"' for name, _ in names)
        clean = {key: value for key, value in environment.items() if key not in dict(names)}
        result = subprocess.run(["bash", "-euc", script], env=clean | own, capture_output=True, text=True, check=True)
        assert result.stdout.split() == ["mine" if own else value for _, value in names]


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
