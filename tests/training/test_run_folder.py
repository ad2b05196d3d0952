"""A run's folder: one job at a time in it, by whom it is held and for how long; and what `status.json` says of it."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megatron_longctx.training.run_folder import RunFolder, RunLock, RunStatus
from tests.shared.jobs import clean_environment

HOLD = """
import sys
from pathlib import Path
from megatron_longctx.training.run_folder import RunLock

lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine" / "lock"


def refused(path: Path) -> str:
    with pytest.raises(ValueError, match=r"^run\.name=mine: expected a run that no other job is training; ") as caught:
        RunLock(path)
    return str(caught.value)


def test_a_second_job_is_refused_until_the_first_has_ended(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with RunLock(path):
            said = refused(path)
            assert f"training; {os.uname().nodename}, process {os.getpid()}, since 20" in said
            assert said.endswith("is training this one. Wait for it, stop it, or choose another run.name.")
            refused(path)
    assert caplog.messages == []


def test_a_job_that_was_killed_holds_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", HOLD, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=clean_environment()) as job:
        assert job.stdout is not None and job.stdout.readline() == b"held\n"
        assert f"process {job.pid}, since" in refused(path)
        job.kill()
        job.wait()
        RunLock(path).release()
    assert caplog.messages == []


def _rank(lock: RunLock, end: Connection) -> None:
    end.send("started")
    end.recv()


def test_ranks_that_outlive_their_launcher_keep_others_out(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    lock = RunLock(path)
    here, there = context.Pipe()
    rank = context.Process(target=_rank, args=(lock, there))
    rank.start()
    assert here.poll(120) and here.recv() == "started"
    lock.release()
    refused(path)
    here.send("end")
    rank.join(120)
    RunLock(path).release()


def test_what_cannot_be_locked_is_said(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    RunLock(path).release()
    assert caplog.messages == [
        f"{path} cannot be locked (No locks available): make sure that no other job trains this run"
    ]


def test_a_job_of_another_host_that_did_not_say_its_end(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("elsewhere, process 7, since 2026-01-01 00:00:00+00:00")
    RunLock(path).release()
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("elsewhere, process 7, since 2026")
    RunLock(path).release()
    assert len(caplog.messages) == 1, "it said its end this time"


def test_it_tells_a_start_from_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    status = RunStatus(tmp_path / "status.json")
    status.start(0, 20)
    assert (status.read()["job"], status.read()["restart"]) == ("7", None)
    status.fail("of the first start")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    status.start(12, 20)
    found = status.read()
    assert (found["state"], found["step"], found["began"], found["saved"], found["steps"]) == (
        "starting",
        12,
        12,
        12,
        20,
    )
    assert found["restart"] == "1" and "message" not in found


def test_running_is_told_now_and_then_and_everything_else_at_once(tmp_path: Path) -> None:
    status = RunStatus(tmp_path / "status.json")
    status.start(0, 20)
    for step in range(1, 10):
        status.update("running", step)
    assert status.read()["step"] == 1
    status.update("running", 10, saved=10)
    assert (status.read()["step"], status.read()["saved"]) == (10, 10)
    status.update("stopped", 11, signal="SIGTERM")
    assert (status.read()["state"], status.read()["signal"]) == ("stopped", "SIGTERM")


def test_the_first_failing_rank_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.status.start(0, 20)
    folder.record_error(3, ValueError("no such thing"))
    folder.record_error(1, RuntimeError("connection closed by peer"))
    assert folder.status.read()["state"] == "failed"
    assert folder.status.read()["message"] == "rank 3 failed: ValueError: no such thing"


def test_what_cannot_be_read_or_written_is_left(tmp_path: Path) -> None:
    assert RunStatus(tmp_path / "gone" / "status.json").read() == {}
    RunStatus(tmp_path / "gone" / "status.json").start(0, 20)
    (tmp_path / "status.json").write_text("[1, 2")
    assert RunStatus(tmp_path / "status.json").read() == {}
