"""Ranks say what they do, and which of them the others may have waited for is found."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from megatron_longctx.config import Config
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
time.sleep(600)
"""


def test_the_last_operation_is_in_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    beats = [Heartbeat(folder, rank) for rank in (0, 1)]
    heartbeat.begin("step 2, a longer name of an operation")
    beats[0].close()
    heartbeat.begin("step 3")
    beats[1].close()
    (folder.ranks / "rank_2.json").write_text('{"torn')
    found = last_operations(folder)
    assert [(rank, doing.operation) for rank, doing in sorted(found.items())] == [
        (0, "step 2, a longer name of an operation"),
        (1, "step 3"),
    ]
    assert found[1].count == found[0].count + 1


def test_a_start_has_its_time(tmp_path: Path) -> None:
    before = time.time()
    Heartbeat(RunFolder(tmp_path), 0).close()
    (found,) = last_operations(RunFolder(tmp_path)).values()
    assert found.operation == "starting" and found.since >= before


def test_signs_of_an_earlier_start_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for rank in range(4):
        Heartbeat(folder, rank).close()
    folder.prepare(Config(), None).release()
    assert last_operations(folder) == {}
    Heartbeat(folder, 1).close()
    assert list(last_operations(folder)) == [1]


def test_who_was_waited_for() -> None:
    ranks = [Operation(rank, "step 5, optimizer", 20, 100.0, 160.0) for rank in range(4)]
    assert suspects(ranks) is None and suspects([]) is None
    ranks[2] = replace(ranks[2], alive=130.0)
    assert str(suspects(ranks)).startswith("rank 2 gave no sign after ")
    behind = replace(ranks[1], operation="step 5, waiting for data", count=18)
    said = suspects([ranks[0], behind, ranks[3]])
    assert said is not None and said.startswith("rank 1 was behind the others, in step 5, waiting for data since ")


def test_a_rank_that_hangs_without_a_collective_ends_and_says_where(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 1, ended.stderr
    note = RunFolder(tmp_path).first_error()
    assert note is not None and "rank 3 failed: TimeoutError: step 7, waiting for data since " in note
    assert "in <module>" in (tmp_path / "errors/rank_3_stacks.txt").read_text()
