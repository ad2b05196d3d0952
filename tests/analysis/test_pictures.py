"""Pictures of the docs are drawn with today's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import pictures


@pytest.mark.parametrize("words", [["inference"], ["rows"], ["attention", "attention_packed_h200_x2"]], ids=" ".join)
def test_pictures_are_drawn(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "picture.png"
    results = [str(pictures.RESULTS / f"{name}.json") for name in words[1:]]
    monkeypatch.setattr("sys.argv", ["pictures", words[0], *results, "--out", str(out)])
    pictures.main()
    assert out.read_bytes().startswith(b"\x89PNG")
