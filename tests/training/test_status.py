"""A run's status.json: who writes what, and that it never stands in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_longctx.training.run_folder import RunFolder
from megatron_longctx.training.status import STATES, RunStatus


def test_it_tells_a_start_from_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    status = RunStatus(tmp_path / "status.json")
    status.begin(0, 20)
    assert (status.read()["job"], status.read()["restart"]) == ("7", None)
    status.fail("of the first start")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    status.begin(12, 20)
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
    status.begin(0, 20)
    for step in range(1, 10):
        status.tell("running", step)
    assert status.read()["step"] == 1
    status.tell("running", 10, saved=10)
    assert (status.read()["step"], status.read()["saved"]) == (10, 10)
    status.tell("stopped", 11, signal="SIGTERM")
    assert (status.read()["state"], status.read()["signal"]) == ("stopped", "SIGTERM")
    assert status.read()["state"] in STATES


def test_the_first_failing_rank_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.status.begin(0, 20)
    folder.note_error(3, ValueError("no such thing"))
    folder.note_error(1, RuntimeError("connection closed by peer"))
    assert folder.status.read()["state"] == "failed"
    assert folder.status.read()["message"] == "rank 3 failed: ValueError: no such thing"


def test_what_cannot_be_read_or_written_is_left(tmp_path: Path) -> None:
    assert RunStatus(tmp_path / "gone" / "status.json").read() == {}
    RunStatus(tmp_path / "gone" / "status.json").begin(0, 20)
    (tmp_path / "status.json").write_text("[1, 2")
    assert RunStatus(tmp_path / "status.json").read() == {}
