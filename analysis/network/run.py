"""Running a job: hosts and links are made, a worker is started on each, and all end together."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .emulate import build, isolated, namespace, reason_not_possible
from .job import Job, Outcome

ROOT = Path(__file__).resolve().parents[2]


def run(job: Job, timeout: float = 1200.0) -> Outcome:
    """Measure `job` on an emulated network; progress goes to standard error.

    Raises:
        PermissionError: this machine cannot emulate a network, with the reason.
        RuntimeError: a rank failed, with the end of what it said.
        TimeoutError: it did not end in time.
    """
    reason = reason_not_possible()
    if reason is not None:
        raise PermissionError(f"a limited network cannot be emulated here: {reason}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job.save(folder / "job")
        command = isolated([sys.executable, "-m", "analysis.network.run", name])
        try:
            # Without an isolated child that outlives it: the process namespace ends with its first process.
            done = subprocess.run(command, cwd=ROOT, env=_environment(), timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{job.cluster.name}: not done within {timeout:.0f} s") from None
        if done.returncode:
            raise RuntimeError(f"{job.cluster.name}: a rank failed.\n{_said(folder)}")
        outcome = pickle.loads((folder / "outcome").read_bytes())
        assert isinstance(outcome, Outcome)
        return outcome


def _environment() -> dict[str, str]:
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # addresses here have no names, which torch warns of
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def _said(folder: Path) -> str:
    logs = {path.stem: path.read_text().strip() for path in sorted(folder.glob("*.log"))}
    return "\n".join(f"{name}: …{text[-1500:]}" for name, text in logs.items() if text)


def main() -> int:
    """Inside: build, start the workers, wait; the first that fails ends all."""
    folder = Path(sys.argv[1])
    job = Job.load(folder / "job")
    build(job.cluster)
    workers = []
    for rank in range(job.cluster.n):
        command = ["ip", "netns", "exec", namespace(rank)]
        command += [sys.executable, "-m", "analysis.network.worker", str(folder), str(rank)]
        log = (folder / f"rank{rank}.log").open("w")
        # Rank 0 says on its standard output how far things are; what any rank complains of goes into its log.
        workers.append(subprocess.Popen(command, stdout=sys.stderr if rank == 0 else log, stderr=log))
    while any(worker.poll() is None for worker in workers):
        if any(worker.poll() for worker in workers):
            break  # the rest end with this process
        time.sleep(0.1)
    return int(any(worker.poll() for worker in workers))  # a signal's code is negative


if __name__ == "__main__":
    sys.exit(main())
