"""`python -m analysis.benchmarks all_reduce` on CPU: its results are complete, and errors are those of the formats."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from analysis.benchmarks import all_reduce
from analysis.benchmarks.__main__ import main
from analysis.benchmarks.all_reduce import Measured, Results, crossovers, measure
from megatron_longctx.lowbit.peer_memory import PeerMemory
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.ranks import Ranks


def test_available_ways_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "all_reduce.json"
    words = "--device cpu --ranks 2 --smallest-kib 1024 --largest-mib 1 --dtype fp32"
    assert main(["all_reduce", *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    found = {(m["way"], m["num_bytes"]): m for m in data["measurements"]}
    ways = ["gloo", "int8 over gloo", "int6 over gloo", "int4 over gloo"]
    assert set(found) == {(way, 2**20) for way in ways}
    assert all(m["seconds"] > 0 for m in found.values()) and data["issued"] == "issued one by one"
    errors = [found[way, 2**20]["error"] for way in ways]
    assert errors[0] < 1e-6 and errors == sorted(errors) and 0.001 < errors[1] < 0.02 < errors[3] < 0.5
    assert set(data["faster_from_bytes"]) == set(ways[1:]) and data["ranks"] == 2
    assert data["left_out"]["over peers"] == "not all ranks have a CUDA device"
    text = out.with_suffix(".md").read_text()
    assert "| 1 MiB |" in text and "Left out: torch symmetric memory (not all" in text


def _append_count(path: Path, results: Results) -> None:
    with path.open("a") as file:
        file.write(f"{len(results.measured)} ")


def test_results_are_written_after_every_size(tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    run_distributed(measure, 2, Ranks(2, "cpu"), (2**12, 2**13), "fp32", partial(_append_count, counts))
    assert counts.read_text() == "4 8 "


def test_crossovers_compare_with_the_library() -> None:
    measured = [Measured("NCCL", size, 1.0, None) for size in (1, 2, 4)]
    measured += [Measured("int8", size, seconds, None) for size, seconds in ((1, 2.0), (2, 0.5), (4, 0.4))]
    measured += [Measured("int4", size, seconds, None) for size, seconds in ((1, 0.5), (2, 0.5), (4, 0.99))]
    assert crossovers(Results(measured)) == {"int8": 2, "int4": None}


def test_kernels_with_other_numbers_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    none = torch.empty(0, dtype=torch.int64)
    memory = PeerMemory(0, 2, none, none, none, 1024, blocks=48)
    left_out: dict[str, str] = {}
    used: list[tuple[int, int]] = []

    def reduce(x: torch.Tensor, bits: int, peers: PeerMemory, **_: object) -> torch.Tensor:
        used.append((peers.blocks, bits))
        return x

    monkeypatch.setattr(all_reduce, "allocate_peer_memory", lambda *_: memory)
    monkeypatch.setattr(all_reduce, "PeerReduction", lambda memory: memory)
    monkeypatch.setattr(all_reduce, "all_reduce", reduce)
    ways = all_reduce._with_blocks(None, torch.device("cpu"), (16, 48, 64), left_out)  # type: ignore[arg-type]
    for prepare in ways.values():
        prepare(torch.zeros(4))()
    assert list(ways) == [f"int{bits} over peers, {count} blocks" for count in (16, 48) for bits in (8, 4)]
    assert used == [(16, 8), (16, 4), (48, 8), (48, 4)] and left_out == {"64 blocks": "a GPU here runs 48 at once"}
