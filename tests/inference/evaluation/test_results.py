"""Results: ranges of positions, scores by task, length and depth, and the files of an evaluation."""

import json
import math
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.inference.evaluation import Haystack, make_questions, score
from megatron_longctx.inference.evaluation.results import (
    CURVES,
    JSON,
    NEEDLES,
    TABLES,
    Losses,
    Results,
    by_depth,
    edges,
    mean_scores,
)

QUESTIONS = list(make_questions(["needle", "niah_multivalue"], [1_200, 2_400], 2, Haystack.noise(), len, [0.0, 1.0]))


@given(st.integers(1, 2**30))
def test_ranges_cover_a_text_and_grow_with_the_position(length: int) -> None:
    found = edges(length)
    assert found[0] == 0 and found[-1] == length and found == sorted(set(found))
    assert len(found) <= 2 * length.bit_length() + 2
    assert all(stop - first <= max(16, first / 2) for first, stop in pairwise(found))


def test_known_ranges() -> None:
    assert edges(1) == [0, 1] and edges(16) == [0, 16] and edges(100) == [0, 16, 24, 32, 48, 64, 96, 100]


def test_means_are_per_token_and_not_per_range() -> None:
    losses = Losses(28, (3.0, 0.0, 3.0), (1.0, 0.0, 3.0))
    assert losses.mean == 1.5 and losses.tokens == 4 and losses.perplexity == math.exp(1.5)
    assert losses.ranges() == [(0, 16, 1.0, 3.0), (16, 24, 0.0, None), (24, 28, 3.0, 1.0)]


def test_scores_are_shares_of_answers_by_length_and_depth() -> None:
    assert len(QUESTIONS) == 2 * 2 * 2 + 2 * 2
    scores = [score(q, f"x {q.answers[0]} y") for q in QUESTIONS]
    task = attrgetter("task")
    expected = {"needle": {1_200: 1.0, 2_400: 1.0}, "niah_multivalue": {1_200: 0.25, 2_400: 0.25}}
    assert mean_scores(scores, task) == expected
    scores[0] = score(QUESTIONS[0], QUESTIONS[1].answers[0])
    assert mean_scores(scores, task)["needle"] == {1_200: 0.75, 2_400: 1.0}
    assert by_depth(scores) == {0.0: {1_200: 0.5, 2_400: 1.0}, 1.0: {1_200: 1.0, 2_400: 1.0}}


def test_scores_are_written_by_task_length_and_depth(tmp_path: Path) -> None:
    results = Results("a run", {"run": "runs/a"})
    results.scores = [score(q, q.answers[0] if q.depth != 1.0 else "no") for q in QUESTIONS]
    results.write(tmp_path)
    written = json.loads((tmp_path / JSON).read_text())
    assert written["complete"] is False and "Not finished" in (tmp_path / TABLES).read_text()
    results.complete = True
    results.write(tmp_path)
    written = json.loads((tmp_path / JSON).read_text())
    assert (
        written["complete"] and written["run"] == "runs/a" and list(written["tasks"]) == ["needle", "niah_multivalue"]
    )
    needle = written["tasks"]["needle"]["lengths"]["2400"]
    assert needle["score"] == 0.5 and needle["by_depth"] == {"0.0": 1.0, "1.0": 0.0} and len(needle["questions"]) == 4
    first = needle["questions"][0]
    assert (first["said"], first["score"], first["depth"]) == (first["answers"][0], 1.0, 0.0) and "prompt" not in first
    several = written["tasks"]["niah_multivalue"]["lengths"]["1200"]
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
    written = json.loads((tmp_path / JSON).read_text())["tasks"]["loss_by_position"]
    assert written["text"] == "data/x" and written["lengths"]["20"]["loss"] == 3.0
    assert written["lengths"]["20"]["positions"][1] == {"first": 16, "stop": 20, "tokens": 0.0, "loss": None}
    assert {path.name for path in tmp_path.iterdir()} == {JSON, TABLES, CURVES}
