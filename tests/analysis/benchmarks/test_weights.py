"""`python -m analysis.benchmarks weights` on CPU: all ways agree, and a cell that fails does not end the others."""

import json
from pathlib import Path

from analysis.benchmarks.__main__ import main
from analysis.benchmarks.weights import WAYS

SETTINGS = ["model=tiny", "train.device=cpu", "train.precision=fp32", "model.num_layers=1", "attention.kernel=cpu"]


def test_all_ways_are_measured_with_the_same_weights(tmp_path: Path) -> None:
    out = tmp_path / "weights.json"
    words = "--lengths 40,100000000 --batches 1 --prompts 60 --tokens 2"
    assert main(["weights", *SETTINGS, *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert len(data["agreement"]) == 2 and all("28 of 28 tokens equal" in text for text in data["agreement"].values())
    whole, shared, tensor = (data["weights"][way] for way in WAYS)
    assert shared == tensor < 0.51 * whole
    for (cell,), key in ((data["decode"], "cached"), (data["prompts"], "tokens")):
        assert cell[key] in (40, 60) and {*cell["seconds"]} == {*WAYS} and min(cell["seconds"].values()) > 0
    assert [failure.split(":")[1] for failure in data["failures"]] == [" CacheFull"]
    assert "| 40 | 1 |" in out.with_suffix(".md").read_text()
