"""`python -m benchmarks planning`: every phase of every new batch, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from megatron_longctx.schedules import build


def test_it_times_what_each_new_batch_needs(tmp_path: Path) -> None:
    out = tmp_path / "planning.json"
    build._built.cache_clear()
    words = ["--ranks", "2", "--schedules", "all_gather,ulysses", "--iterations", "3", "--out", str(out)]
    assert main(["planning", *words]) == 0
    assert build._built.cache_info().hits == 0, "batches that were known cost less"
    data = json.loads(out.read_text())
    for phases in data["milliseconds"].values():
        assert [len(phase) for phase in phases] == [3] * 4 and min(map(min, phases)) > 0
    text = out.with_suffix(".md").read_text()
    assert text.startswith("24 documents in 65,536 tokens, 2 ranks") and "\n| ulysses | " in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pack", "7"], "--pack=7: expected one of 24, 6, 15, 64x1K, magi"),
        (["--ranks", "0"], "--ranks=0: expected 1 or more"),
        (["--iterations", "0"], "--iterations=0: expected 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["planning", *words, "--out", str(tmp_path / "x.json")]) == 2
    assert said in capsys.readouterr().err
