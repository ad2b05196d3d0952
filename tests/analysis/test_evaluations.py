"""Comparisons of evaluations: their tables, and folders that do not belong to one model."""

import json
from pathlib import Path
from typing import Any

import pytest

from analysis import evaluations


def _folder(path: Path, tasks: dict[str, Any], **about: Any) -> Path:
    path.mkdir()
    environment = {"date": "2026-01-02", "commit": "abc", "device": "cpu"}
    found = {"run": "runs/a", "iteration": 3, "config": {"model": {}}, "environment": environment, **about}
    (path / "eval.json").write_text(json.dumps({**found, "tasks": tasks}))
    return path


def _score(*shares: tuple[int, float]) -> dict[str, Any]:
    return {"lengths": {str(length): {"score": share} for length, share in shares}}


def _losses(*values: float) -> dict[str, Any]:
    ranges = [{"first": 16 * i, "stop": 16 * i + 16, "tokens": 16, "loss": loss} for i, loss in enumerate(values)]
    return {"text": "essays", "lengths": {str(16 * len(values)): {"positions": ranges}}}


def test_models_are_compared(tmp_path: Path) -> None:
    short = _folder(tmp_path / "short", {"needle": _score((1024, 0.5)), "niah_single": _score((1024, 1.0))})
    long = _folder(tmp_path / "long", {"needle": _score((2048, 0.25)), "loss_by_position": _losses(2.5, 1.25)})
    after = _folder(
        tmp_path / "after", {"needle": _score((2048, 0.75)), "loss_by_position": _losses(2.0, 1.0)}, iteration=9
    )
    words = [str(tmp_path / "out"), f"before={short},{long}", f"after={after}", "--title", "Two models"]
    assert evaluations.main(words) == 0
    lines = (tmp_path / "out.md").read_text().splitlines()
    assert lines[0] == "# Two models" and "2026-01-02; cpu; commit abc" in lines
    for line in (
        "| needle | before | 50 | 25 |",
        "| needle | after |  | 75 |",
        "| mean | before | 75.0 |  |",  # one of its tasks has no score at 2,048
        "| 0 to 15 | 2.500 | 2.000 |",
        "| 16 to 31 | 1.250 | 1.000 |",
    ):
        assert line in lines, line
    kept = json.loads((tmp_path / "out.json").read_text())["models"]
    assert kept["before"]["tasks"]["needle"]["lengths"].keys() == {"1024", "2048"}
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_folders_of_different_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = _folder(tmp_path / "one", {"needle": _score((1024, 0.5))})
    later = _folder(tmp_path / "later", {"needle": _score((2048, 0.5))}, iteration=4)
    cut = _folder(tmp_path / "cut", {"needle": _score((2048, 0.5))}, complete=False)
    for folders, message in (
        (f"{one},{cut}", "expected one of an evaluation that came to its end"),
        (f"{one},{later}", "expected the iteration of"),
        (f"{one},{one}", "expected needle of other lengths than 1024"),
        (str(tmp_path), "expected one with an eval.json"),
    ):
        assert evaluations.main([str(tmp_path / "out"), f"x={folders}", "--title", "x"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
