"""Heartbeats: every rank's last operation, the ranks that others may have waited for, and the end of a hanging rank."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_longctx.config import Config
from megatron_longctx.testing.distributed import PATIENCE_S
from megatron_longctx.training import heartbeat
from megatron_longctx.training.heartbeat import Heartbeat, Operation, last_operations, suspects
from megatron_longctx.training.run_folder import RunFolder

HANGS = """
import sys, time
from pathlib import Path
from megatron_longctx.training import heartbeat
from megatron_longctx.training.run_folder import RunFolder
heartbeat._PERIOD_S = 0.05
heartbeat.Heartbeat(RunFolder(Path(sys.argv[1])), 3)
heartbeat.begin("step 7, waiting for data", 0.3)
time.time = lambda: 0.0  # the clock is set back
time.sleep(600)
"""


def test_the_last_operations_are_in_the_folder(tmp_path: Path) -> None:
    folder, before = RunFolder(tmp_path), time.time()
    beats = [Heartbeat(folder, rank) for rank in (0, 1, 3)]
    beats[2].close()
    heartbeat.begin("step 2, a longer name of an operation")
    beats[0].close()
    heartbeat.begin("step 3")
    beats[1].close()
    (folder.ranks / "rank_2.json").write_text('{"torn')
    operations = last_operations(folder)
    expected = {0: "step 2, a longer name of an operation", 1: "step 3", 3: "starting"}
    assert {rank: each.operation for rank, each in operations.items()} == expected
    assert operations[1].count == operations[0].count + 1 and operations[3].since >= before


def test_a_start_removes_heartbeats_of_earlier_starts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for rank in range(4):
        Heartbeat(folder, rank).close()
    folder.prepare(Config(), None).release()
    assert last_operations(folder) == {}
    Heartbeat(folder, 1).close()
    assert list(last_operations(folder)) == [1]


def test_rank_0_tells_what_takes_long_except_passes_of_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "_PERIOD_S", 0.001)
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.002)
    caplog.set_level("INFO")
    beats = [Heartbeat(RunFolder(tmp_path), rank) for rank in (0, 1)]
    passes = "forward and backward"
    later = [f"step 5, {passes}", "step 5, optimizer"]
    for operation in ("loading a checkpoint", f"step 4, {passes}", *later, "step 5, saving"):
        heartbeat.begin(operation)
        while operation not in later and f"{operation}: " not in caplog.text:
            time.sleep(0.002)
        time.sleep(0.02)
    for beat in beats:
        beat.close()
    told = [line.split(": ")[0] for line in caplog.messages]
    assert {*told} - {"starting"} == {"loading a checkpoint", f"step 4, {passes}", "step 5, saving"}


def test_suspects_are_silent_or_behind() -> None:
    ranks = [Operation(rank, "step 5, optimizer", 20, 100.0, 160.0) for rank in range(4)]
    assert suspects(ranks) is None and suspects([]) is None
    ranks[2] = replace(ranks[2], alive=130.0)
    assert str(suspects(ranks)).startswith("rank 2 gave no sign after ")
    behind = replace(ranks[1], operation="step 5, waiting for data", count=18)
    assert str(suspects([ranks[0], behind, ranks[3]])).startswith(
        "rank 1 was behind the others, in step 5, waiting for data since "
    )


def test_a_rank_that_hangs_without_a_collective_ends_with_its_stacks(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 1, ended.stderr
    error = RunFolder(tmp_path).first_error()
    assert error is not None and "rank 3 failed: TimeoutError: step 7, waiting for data since " in error
    assert "in <module>" in (tmp_path / "errors/rank_3_stacks.txt").read_text()
