"""`bench all_reduce` on CPU: what it writes is complete, errors are those of the formats, omissions are named."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_longctx import cli
from megatron_longctx.bench.all_reduce import Found, Measured, Sizes, measure
from megatron_longctx.bench.all_reduce_report import crossovers
from megatron_longctx.bench.command import Where
from megatron_longctx.testing.distributed import run_distributed


def test_it_measures_what_there_is(tmp_path: Path) -> None:
    out = tmp_path / "all_reduce.json"
    words = "--device cpu --ranks 2 --smallest-kib 256 --largest-mib 1 --step 4 --dtype fp32 --group-size 32"
    assert cli.main(["bench", "all_reduce", *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    found = {(m["way"], m["num_bytes"]): m for m in data["measurements"]}
    ways = ["gloo", "int8 over gloo", "int6 over gloo", "int4 over gloo"]
    assert set(found) == {(way, 2**k) for way in ways for k in (18, 20)}
    assert all(m["seconds"] > 0 for m in found.values()) and data["from_cuda_graphs"] is False
    errors = [found[way, 2**20]["error"] for way in ways]
    assert errors[0] < 1e-6 and errors == sorted(errors) and 0.001 < errors[1] < 0.02 < errors[3] < 0.5
    assert set(data["faster_from_bytes"]) == set(ways[1:]) and data["ranks"] == 2
    assert data["left_out"]["over peers"] == "not all ranks have a CUDA device"
    text = out.with_suffix(".md").read_text()
    assert "| 256 KiB |" in text and "| 1 MiB |" in text and "Left out: torch symmetric memory (not all" in text
    assert out.with_suffix(".png").stat().st_size > 10_000


def _note(path: Path, found: Found) -> None:
    path.write_text(path.read_text() + f"{len(found.measured)} ")


def test_every_size_is_kept_at_once(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.write_text("")
    sizes = Sizes(2**16, 2**18, 4, torch.float32)
    run_distributed(measure, 2, Where(2, "cpu"), sizes, partial(_note, told))
    assert told.read_text() == "4 8 "


def test_sizes_and_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert Sizes(2**16, 2**20, 4, None).all() == [2**16, 2**18, 2**20]
    assert Sizes(2**16, 2**19, 4, None).all() == [2**16, 2**18, 2**19], "the largest is always there"
    for words, said in ((["--step", "3"], "--step=3: expected 2 or 4"), (["--ranks", "1"], "--ranks=1: expected 2")):
        assert cli.main(["bench", "all_reduce", "--device", "cpu", "--out", "here.json", *words]) != 0
        assert said in capsys.readouterr().err
    assert cli.main(["bench", "all_reduce", "--device", "cpu", "--out", "here.txt"]) != 0
    assert "expected a .json file" in capsys.readouterr().err


def test_crossovers_are_against_the_library() -> None:
    measured = [Measured("NCCL", size, 1.0, None) for size in (1, 2, 4)]
    measured += [Measured("int8", size, seconds, None) for size, seconds in ((1, 2.0), (2, 0.5), (4, 0.4))]
    measured += [Measured("int4", size, seconds, None) for size, seconds in ((1, 0.5), (2, 0.5), (4, 0.99))]
    assert crossovers(measured, "NCCL") == {"int8": 2, "int4": None}
