"""`python -m benchmarks parts` on CPU: attention is a part of its layer, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.parts import Parts, medians

SETTINGS = ["parallelism=single", "train.device=cpu", "train.precision=fp32", "model.num_layers=2"]


def test_attention_is_a_part_of_its_layer(tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    words = "--lengths 64,16 --iterations 3 attention.kernel=cpu"
    assert main(["parts", *SETTINGS, *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert [each["tokens"] for each in data["measurements"]] == [16, 64] and data["model"]["num_layers"] == 2
    for each in data["measurements"]:
        assert len(each["attention"]) == len(each["layer"]) == 2 * 3
        assert all(0 < part < whole for part, whole in zip(each["attention"], each["layer"], strict=True))
    assert "\n| 64 | " in out.with_suffix(".md").read_text()


def test_the_table_shows_shares() -> None:
    assert (
        medians([Parts(4096, [0.001, 0.002, 0.009], [0.008] * 3)]).splitlines()[-1] == "| 4,096 | 2.00 | 6.00 | 25% |"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lengths", "a"], "--lengths=a: expected whole numbers of 2 or more"),
        (["--iterations", "0"], "--iterations=0: expected 1 or more"),
        (["parallelism=cp2"], "parallelism=2 ranks: expected 1"),
    ],
)
def test_what_is_refused(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parts", *SETTINGS, "--out", str(tmp_path / "parts.json"), *words]) == 2
    assert said in capsys.readouterr().err
