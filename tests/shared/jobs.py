"""Whole jobs as a user starts them: a command in a process of its own, watched, signalled and waited for."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_longctx.config import names
from megatron_longctx.testing.distributed import PATIENCE_S
from tests.shared.processes import Quick

CLI = (sys.executable, "-m", "megatron_longctx.cli.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TORCHRUN_2 = (*TORCHRUN, "--nproc-per-node", "2", *CLI[1:])
TINY = (  # a model so small that starting the ranks is what takes the time
    *("data.prefix=data/tiny", "data.seq_length=64", "train.precision=fp32", "optim.warmup_steps=1"),
    *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "logging.wandb=disabled"),
)
_ROOT = Path(__file__).resolve().parents[2]
# What would make a process take itself for a rank of somebody else's job, or change what it prints.
_STRANGERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONWARNINGS")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without traces of other jobs, one thread a process, with `more` set."""
    kept = {k: v for k, v in os.environ.items() if k not in _STRANGERS and not k.startswith(("SLURM_", "WANDB_"))}
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1"}
    # Nothing is compiled on CPUs, and to import what could costs each process seconds.
    return kept | ours | {"TORCH_COMPILE_DISABLE": "1"} | more


@dataclass
class Job:
    """A running command. `out` and `err` are files that its standard output and error go to."""

    process: subprocess.Popen[bytes] | Quick
    out: Path
    err: Path
    family: set[psutil.Process] = field(default_factory=set)

    def wait_for(self, text: str, timeout: float = PATIENCE_S) -> None:
        """Wait until `text` is on standard output.

        Raises:
            AssertionError: the command ended, or time passed, before.
        """
        deadline = time.monotonic() + timeout
        while text not in self.out.read_text():
            ended = self.process.poll()
            assert ended is None, f"ended with {ended} before printing {text!r}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s:\n{self.output()}"
            self.remember()
            time.sleep(0.02)
        self.remember()

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """The exit code.

        Raises:
            AssertionError: the command has not ended within `timeout` seconds.
        """
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output()}") from None

    def remember(self) -> None:
        """Note the processes that belong to this job now, to be asked for by `left_over`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family.update(psutil.Process(self.process.pid).children(recursive=True))

    def listening(self) -> set[str]:
        """The addresses at which processes of the job listen."""
        self.remember()
        found: set[str] = set()
        for process in (*self.family, psutil.Process(self.process.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = process.net_connections("inet")
                found.update(c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN)
        return found

    def ranks(self) -> list[psutil.Process]:
        """The ranks that the command's launcher has started itself, in order."""
        children = psutil.Process(self.process.pid).children()
        if isinstance(self.process, Quick) and not torch.cuda.is_available():  # forks of its server
            servers, children = children, []
            for server in servers:
                with contextlib.suppress(psutil.NoSuchProcess):  # a fork that checks the job has ended
                    children += server.children()
        return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]

    def left_over(self) -> list[psutil.Process]:
        """Processes of the job that stay; waits as long as there are any, `PATIENCE_S` at most."""
        _, alive = psutil.wait_procs([p for p in self.family if p.pid != self.process.pid], PATIENCE_S)
        return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def output(self) -> str:
        """Standard output and error so far."""
        return f"{self.out.read_text()}\n--- standard error\n{self.err.read_text()}"

    def end(self) -> None:
        """Kill whatever is left of it."""
        self.remember()
        for process in (*self.family, psutil.Process(self.process.pid) if self.process.poll() is None else None):
            if process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


@contextlib.contextmanager
def started(
    folder: Path,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    stdin: str = os.devnull,
    quick: bool = False,
) -> Iterator[Job]:
    """Start `command` in `folder`; whatever is left of it is killed at the end of the context. quick: as `Quick` does,
    a command of this project or torchrun."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; commands would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    number = len(list(folder.glob("*.stdout")))
    out, err = folder / f"{number}.stdout", folder / f"{number}.stderr"
    env = dict(environment or clean_environment())
    process: subprocess.Popen[bytes] | Quick
    if quick:
        out.touch()
        err.touch()
        program, words = tuple(command[:3]), command[3:]
        assert program in (CLI, TORCHRUN), command
        process = Quick(words if program == CLI else ["torchrun", *words], folder, (stdin, str(out), str(err)), env)
    else:
        with open(stdin, "rb") as given, out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(
                list(command), cwd=folder, stdin=given, stdout=to_out, stderr=to_err, env=env, start_new_session=True
            )
    job = Job(process, out, err)
    try:
        yield job
    finally:
        job.end()


def finished(folder: Path, command: Sequence[str], environment: Mapping[str, str] | None = None, **how: Any) -> Job:
    """Run `command` in `folder` to its end. how: more for `started`.

    Raises:
        AssertionError: it takes much longer than on any machine.
    """
    with started(folder, command, environment, **how) as job:
        deadline = time.monotonic() + PATIENCE_S
        while job.process.poll() is None and time.monotonic() < deadline:
            job.remember()
            time.sleep(0.1)
        job.wait(0.1)
    return job


def steps_recorded(run: Path) -> list[int]:
    """The steps in a run's `metrics.jsonl`, in the order they stand there."""
    return [json.loads(line)[names.STEP] for line in (run / "metrics.jsonl").read_text().splitlines()]


def latest_checkpoint(run: Path) -> int:
    """The step that a run's tracker file names."""
    return int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
