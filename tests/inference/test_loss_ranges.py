"""Ranges of positions, their losses, and the files of an evaluation."""

import json
import math
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.inference.loss_ranges import CURVES, JSON, TABLES, Losses, Results, edges


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


def test_losses_are_written_side_by_side(tmp_path: Path) -> None:
    losses = [Losses(16, (32.0,), (16.0,)), Losses(20, (48.0, 0.0), (16.0, 0.0))]
    results = Results("a run", {"run": "runs/a"}, "data/x", losses)
    results.write(tmp_path)
    assert "Not finished" in (tmp_path / TABLES).read_text()
    assert json.loads((tmp_path / JSON).read_text())["complete"] is False
    results.complete = True
    results.write(tmp_path)
    tables = (tmp_path / TABLES).read_text()
    for row in ("| 16 | 2.00000 | 7.3891 | 16 |", "| 0 to 15 | 2.0000 | 3.0000 |", "| 16 to 19 |  |  |"):
        assert row in tables
    written = json.loads((tmp_path / JSON).read_text())
    found = written["tasks"]["loss_by_position"]
    assert written["complete"] and written["run"] == "runs/a" and "Not finished" not in tables
    assert found["text"] == "data/x" and found["lengths"]["20"]["loss"] == 3.0
    assert found["lengths"]["20"]["positions"][1] == {"first": 16, "stop": 20, "tokens": 0.0, "loss": None}
    assert {path.name for path in tmp_path.iterdir()} == {JSON, TABLES, CURVES}
