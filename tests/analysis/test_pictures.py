"""Pictures of the docs are drawn with today's code."""

from pathlib import Path

import numpy
import pytest
from matplotlib.image import imread

from analysis import pictures

MOST_DIFFERENT = 2e-4  # of the pixels: versions of fonts differ less, and ten digits in another colour more
WITH_A_TABLE = "attention attention_packed_h200_x2", "trees trees_h200_x2", "hybrid hybrid_h200_x2"


@pytest.mark.parametrize("words", ["inference", "plan", "reductions", "rows", *WITH_A_TABLE])
def test_pictures_of_the_docs_are_those_that_the_code_draws(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, (picture, *tables) = tmp_path / "picture.png", words.split()
    results = [str(pictures.RESULTS / f"{name}.json") for name in tables]
    monkeypatch.setattr("sys.argv", ["pictures", picture, *results, "--out", str(out)])
    pictures.main()
    shown = pictures.RESULTS / f"{tables[0]}.png" if tables else pictures.PICTURES[picture][1]
    drawn, committed = imread(out)[..., :3], imread(shown)[..., :3]
    assert drawn.shape == committed.shape, f"{shown} is of earlier code: make pictures"
    different = float(numpy.mean(numpy.abs(drawn - committed).max(axis=2) > 0.1))
    assert different <= MOST_DIFFERENT, f"{different:.2%} of {shown} differ from what the code draws: make pictures"
