"""What is written of an evaluation: every score under its task, length and depth, and pictures of what there is."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_longctx.evaluation import Haystack, questions, score
from megatron_longctx.evaluation.asking import Form
from megatron_longctx.evaluation.positions import Losses
from megatron_longctx.evaluation.results import CURVES, JSON, NEEDLES, TABLES, Results

ASKED = list(questions(["needle", "niah_multivalue"], [1_200, 2_400], 2, Haystack.noise(), Form(len), [0.0, 1.0]))


def test_scores_are_written_by_task_length_and_depth(tmp_path: Path) -> None:
    results = Results("a run", {"run": "runs/a"})
    results.found = [score(asked, asked.answers[0] if asked.depth != 1.0 else "no") for asked in ASKED]
    results.write(tmp_path)
    found = json.loads((tmp_path / JSON).read_text())
    assert found["complete"] is False and "Not finished" in (tmp_path / TABLES).read_text()
    results.complete = True
    results.write(tmp_path)
    found = json.loads((tmp_path / JSON).read_text())
    assert found["complete"] and found["run"] == "runs/a" and list(found["tasks"]) == ["needle", "niah_multivalue"]
    needle = found["tasks"]["needle"]["lengths"]["2400"]
    assert needle["score"] == 0.5 and needle["by_depth"] == {"0.0": 1.0, "1.0": 0.0} and len(needle["questions"]) == 4
    first = needle["questions"][0]
    assert (first["said"], first["score"], first["depth"]) == (first["answers"][0], 1.0, 0.0) and "prompt" not in first
    several = found["tasks"]["niah_multivalue"]["lengths"]["1200"]
    assert several["score"] == 0.25 and "by_depth" not in several
    tables = (tmp_path / TABLES).read_text()
    for row in ("| needle | 50.0 | 50.0 |", "| niah_multivalue | 25.0 | 25.0 |", "| 0% | 100.0 | 100.0 |"):
        assert row in tables
    assert "4 to 8 questions a task" in tables and "Losses" not in tables and "Not finished" not in tables
    assert {path.name for path in tmp_path.iterdir()} == {JSON, TABLES, NEEDLES}


def test_losses_are_written_side_by_side(tmp_path: Path) -> None:
    losses = [Losses(16, (32.0,), (16.0,)), Losses(20, (48.0, 0.0), (16.0, 0.0))]
    Results("a run", {}, "data/x", losses).write(tmp_path)
    tables = (tmp_path / TABLES).read_text()
    for row in ("| 16 | 2.00000 | 7.3891 | 16 |", "| 0 to 15 | 2.0000 | 3.0000 |", "| 16 to 19 |  |  |"):
        assert row in tables
    found = json.loads((tmp_path / JSON).read_text())["tasks"]["loss_by_position"]
    assert found["text"] == "data/x" and found["lengths"]["20"]["loss"] == 3.0
    assert found["lengths"]["20"]["positions"][1] == {"first": 16, "stop": 20, "tokens": 0.0, "loss": None}
    assert {path.name for path in tmp_path.iterdir()} == {JSON, TABLES, CURVES}
