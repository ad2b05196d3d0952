"""The benchmark of hybrid models: what its table says."""

import json
from pathlib import Path

from analysis.benchmarks.hybrid import ALONE, HELPER, MEGATRON, Cell, Options, record
from analysis.benchmarks.report import Report


def test_speeds_are_compared_with_one_gpu_on_the_same_pack(tmp_path: Path) -> None:
    report = Report(tmp_path / "x.json", "cpu", "seconds", "layers", "ranks")
    cells = [
        Cell(ALONE, (64,), [2.0, 9.0, 1.0]),
        Cell(HELPER, (64,), [1.25]),
        Cell(MEGATRON, (64,), error="no memory"),
        Cell(HELPER, (32, 32), [1.0]),
    ]
    text = record(report, 2, Options((), 3, True, 1.0, compiled=(tmp_path,)), [], cells)
    assert "| 64 | 1 | one GPU | 32 | 100.0% |" in text
    assert "| 64 | 1 | contiguous, helper | 51 | 80.0% |" in text
    assert "| 64 | 2 | contiguous, helper | 64 |  |" in text and "not possible: no memory" in text
    found = json.loads((tmp_path / "x.json").read_text())["cells"]
    assert [cell["percent_of_one_gpu"] for cell in found] == [100.0, 80.0, None, None]
