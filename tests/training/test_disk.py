"""A full disk is named, with what of the run is safe, whoever meets it."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from megatron_longctx.testing.distributed import start_context
from megatron_longctx.training import launcher
from megatron_longctx.training.run_folder import DiskFull, RunFolder, disk_full


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
def test_what_is_safe_is_named(run: RunFolder, number: int) -> None:
    full = disk_full(OSError(number, os.strerror(number), "metrics.jsonl"), run)
    assert isinstance(full, DiskFull)
    assert str(full).startswith(f"[Errno {number}] {os.strerror(number)}: 'metrics.jsonl'. ")
    assert " MiB are free on /" in str(full) and "There is no checkpoint yet. Free space" in str(full)
    (run.checkpoints / "iter_0000007").mkdir()
    (run.checkpoints / "iter_0000007" / "data").write_bytes(bytes(3 * 2**20))
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("7")
    wrapped = _raised(RuntimeError("the save failed"), _raised(OSError(number, os.strerror(number))))
    said = str(disk_full(wrapped, run))
    assert f"{run.checkpoints}/iter_0000007 (3 MiB) is safe." in said
    assert said.endswith("the same command then goes on from step 7.")


def test_other_failures_stay_what_they_are(run: RunFolder) -> None:
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
def test_torch_is_understood(tmp_path: Path, as_stream: bool) -> None:
    process = start_context().Process(target=_save_too_much, args=(tmp_path / "file", as_stream))
    process.start()
    process.join(120)
    assert process.exitcode == 3


def test_a_note_that_cannot_be_written_hides_no_failure(run: RunFolder) -> None:
    run.errors.write_text("in the way")
    run.record_error(1, DiskFull("no room"))
    traceback = "Traceback (most recent call last):\n  …\nmegatron_longctx.training.disk.DiskFull: no room: 0 MiB\n"
    died = ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n{traceback}", 1, 77)
    assert launcher._reason(died, run, {}) == "rank 1 failed: DiskFull: no room: 0 MiB"
