"""A run's folder: the lock and its holder, `status.json`, recorded errors, and reports of full disks."""

import errno
import fcntl
import multiprocessing
import os
import resource
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from megatron_longctx.testing.distributed import PATIENCE_S, start_context
from megatron_longctx.training import launcher
from megatron_longctx.training.ranks import RankFailed
from megatron_longctx.training.run_folder import DiskFull, RunFolder, RunLock, RunStatus, disk_full
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
            message = refused(path)
            assert f"training; {os.uname().nodename}, process {os.getpid()}, since 20" in message
            assert message.endswith("is training this one. Wait for it, stop it, or choose another run.name.")
            refused(path)
    assert caplog.messages == []


def test_a_killed_job_does_not_hold_the_lock(path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_ranks_that_outlive_their_launcher_hold_the_lock(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    lock = RunLock(path)
    here, there = context.Pipe()
    rank = context.Process(target=_rank, args=(lock, there))
    rank.start()
    assert here.poll(PATIENCE_S) and here.recv() == "started"
    lock.release()
    message = refused(path)
    held = f"its lock is held on this host by process {rank.pid}"
    assert f"training; {os.uname().nodename} ({held}) is training this one" in message
    here.send("end")
    rank.join(PATIENCE_S)
    RunLock(path).release()


def test_a_lock_does_not_change_another_file(path: Path) -> None:
    precious = path.parent / "precious"
    precious.write_text("kept")
    for link in (path.symlink_to, path.hardlink_to):
        link(precious)
        with pytest.raises(OSError, match=r"lock is (a link to .*precious|not a file of its own): delete it"):
            RunLock(path)
        assert precious.read_text() == "kept"
        path.unlink()
    path.write_text("a longer text than the name of a holder " * 5)
    with RunLock(path):
        assert path.read_text().strip().startswith(f"{os.uname().nodename}, process {os.getpid()}")
    assert path.read_text().strip() == ""


def test_a_file_system_without_locks_causes_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    RunLock(path).release()
    assert caplog.messages == [
        f"{path} cannot be locked (No locks available): make sure that no other job trains this run"
    ]


def test_a_holder_on_another_host_that_did_not_report_its_end(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("elsewhere, process 7, since 2026-01-01 00:00:00+00:00")
    for _ in range(2):  # the second time, the previous holder reported its end
        RunLock(path).release()
        assert len(caplog.messages) == 1 and caplog.messages[0].startswith("elsewhere, process 7, since 2026")


def test_the_status_of_a_start_replaces_that_of_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    status = RunStatus(tmp_path / "status.json")
    status.start(0, 20)
    assert (status.read()["job"], status.read()["restart"]) == ("7", None)
    status.fail("of the first start")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    status.start(12, 20)
    content = status.read()
    steps = {"step": 12, "began": 12, "saved": 12, "steps": 20}
    expected = {"state": "starting", "restart": "1", **steps}
    assert {key: content[key] for key in expected} == expected and "message" not in content


def test_steps_are_written_every_few_seconds_and_other_updates_immediately(tmp_path: Path) -> None:
    status = RunStatus(tmp_path / "status.json")
    status.start(0, 20)
    for step in range(1, 10):
        status.update("running", step)
    assert status.read()["step"] == 1
    status.update("running", 10, saved=10)
    assert (status.read()["step"], status.read()["saved"]) == (10, 10)
    status.update("stopped", 11, signal="SIGTERM")
    assert (status.read()["state"], status.read()["signal"]) == ("stopped", "SIGTERM")


def test_the_status_names_the_first_failing_rank(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.status.start(0, 20)
    folder.record_error(3, ValueError("no such thing"))
    folder.record_error(1, RuntimeError("connection closed by peer"))
    assert folder.status.read()["state"] == "failed"
    assert folder.status.read()["message"] == "rank 3 failed: ValueError: no such thing"


def test_a_status_that_cannot_be_read_or_written_is_ignored(tmp_path: Path) -> None:
    assert RunStatus(tmp_path / "gone" / "status.json").read() == {}
    RunStatus(tmp_path / "gone" / "status.json").start(0, 20)
    (tmp_path / "status.json").write_text("[1, 2")
    assert RunStatus(tmp_path / "status.json").read() == {}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    return folder


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_the_report_of_a_full_disk_names_the_safe_checkpoint(run: RunFolder, number: int) -> None:
    full = disk_full(OSError(number, os.strerror(number), "metrics.jsonl"), run)
    assert isinstance(full, DiskFull)
    assert str(full).startswith(f"[Errno {number}] {os.strerror(number)}: 'metrics.jsonl'. ")
    assert " MiB are free on /" in str(full) and "There is no checkpoint yet. Free space" in str(full)
    (run.checkpoints / "iter_0000007").mkdir()
    (run.checkpoints / "iter_0000007" / "data").write_bytes(bytes(3 * 2**20))
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("7")
    wrapped = _raised(RuntimeError("the save failed"), _raised(OSError(number, os.strerror(number))))
    message = str(disk_full(wrapped, run))
    assert f"{run.checkpoints}/iter_0000007 (3 MiB) is safe." in message
    assert message.endswith("the same command then goes on from step 7.")


def test_other_errors_are_not_reported_as_a_full_disk(run: RunFolder) -> None:
    for error in (OSError(errno.EIO, "Input/output error"), ValueError("x"), KeyboardInterrupt()):
        assert disk_full(_raised(error, RuntimeError("y")), run) is None


def _save_too_much(to: Path, as_stream: bool) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # of this process, which ends
    try:
        if as_stream:
            with to.open("wb") as stream:
                torch.save(torch.zeros(100_000), stream)
        else:
            torch.save(torch.zeros(100_000), to)
    except Exception as error:
        os._exit(3 if disk_full(error, RunFolder(to.parent)) else 4)
    os._exit(0)


@pytest.mark.parametrize("as_stream", [False, True])
def test_errors_of_torch_save_are_recognized(tmp_path: Path, as_stream: bool) -> None:
    process = start_context().Process(target=_save_too_much, args=(tmp_path / "file", as_stream))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 3


def test_an_error_that_cannot_be_recorded_is_still_reported(run: RunFolder) -> None:
    run.errors.write_text("in the way")
    run.record_error(1, DiskFull("no room"))
    traceback = (
        "Traceback (most recent call last):\n  …\nmegatron_longctx.training.run_folder.DiskFull: no room: 0 MiB\n"
    )
    assert launcher._reason(RankFailed(1, 1, traceback), run) == "rank 1 failed: DiskFull: no room: 0 MiB"
