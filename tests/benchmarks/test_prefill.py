"""`python -m benchmarks prefill` on CPU: first tokens under every reduction, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.prefill import Prefill, medians

SETTINGS = ["parallelism.tensor_parallel_size=2", "train.device=cpu", "train.precision=fp32", "model.num_layers=1"]


def test_it_measures_every_reduction_and_says_what_auto_goes_by(tmp_path: Path) -> None:
    out = tmp_path / "prefill.json"
    words = "--lengths 32,16 --reductions none,auto,int8 --iterations 2 reduction.min_kib=0 attention.kernel=cpu"
    assert main(["prefill", *SETTINGS, *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    cases = [(m["tokens"], m["reduction"]) for m in data["measurements"]]
    assert cases == [(tokens, name) for tokens in (16, 32) for name in ("none", "auto", "int8")]
    assert all(len(m["seconds"]) == 2 and min(m["seconds"]) <= m["median"] > 0 for m in data["measurements"])
    assert data["tensor_parallel_size"] == 2 and data["model"]["num_layers"] == 1 and data["environment"]["commit"]
    assert set(data["auto_from_bytes"]) == {"all_reduce of float32"}
    text = out.with_suffix(".md").read_text()
    assert "\n| 32 | " in text and "\nauto: all_reduce of float32 is quantized " in text


def test_the_table_compares_with_none() -> None:
    found = [Prefill(8, "none", [0.2, 0.1, 0.3]), Prefill(8, "int8", [0.1, 0.1, 0.5])]
    assert medians(found).splitlines()[-1] == "| 8 | 200.00 | 100.00 (0.500) |"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lengths", "a"], "--lengths=a: expected whole numbers of 2 or more"),
        (["--reductions", "int5"], "--reductions=int5: expected of none, int8"),
        (["--iterations", "0"], "--iterations=0: expected 1 or more"),
        ([], "parallelism.tensor_parallel_size=1: expected 2 or more"),
        (["parallelism=cp2"], "parallelism.context_parallel_size=2: expected 1"),
    ],
)
def test_what_is_refused(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefill", "train.device=cpu", "--out", str(tmp_path / "prefill.json"), *words]) == 2
    assert said in capsys.readouterr().err
