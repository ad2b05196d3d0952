"""Quantized sums on emulated slow links, and what is reported of them and of perplexities."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

from megatron_longctx.mcore.tokenizer import build_tokenizer
from megatron_longctx.topology import Cluster, Mesh, Network
from tests.shared.jobs import PATIENCE_S

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
emulate = importlib.import_module("analysis.network.emulate")
sums = importlib.import_module("analysis.network.all_reduce")
perplexity = importlib.import_module("analysis.perplexity")


def test_sums_over_limited_links_are_right() -> None:
    reason = emulate.reason_not_possible()
    if reason is not None:
        pytest.skip(f"no network can be emulated here: {reason}")
    cluster = Cluster("3 hosts", 3, 1, Mesh(1.0), Network(1, 0.02))
    found = sums.measure(sums.Job(cluster, (6,), group_size=128, repeats=1), timeout=PATIENCE_S)
    assert [(f.operation, f.mode) for f in found] == list(itertools.product(sums.OPERATIONS, sums.MODES))
    for operation in sums.OPERATIONS:
        error = {f.mode: f.error for f in found if f.operation == operation}
        assert error["none"] < 0.01 and error["none"] < error["int8"] < error["int6"] <= error["int4"] < 0.4
    assert all(f.equal and f.seconds > 0 and f.num_bytes == 6 * 4096 * 2 for f in found)


def test_speeds_are_against_the_unquantized_of_the_same_size(tmp_path: Path) -> None:
    seconds = {"none": 8.0, "int8": 4.0, "int6": 3.2, "int4": 2.0}
    found = [
        sums.Found(operation, mode, size, value * size / 2**20, 0.01, True)
        for operation in sums.OPERATIONS
        for size in (2**18, 2**20, 2**22)
        for mode, value in seconds.items()
    ]
    assert set(sums.speeds(found).values()) == {1.0, 2.0, 2.5, 4.0}
    assert "| all_reduce | 0.25 | int4 | 500.0 | 4.00 | 0.01000 |" in sums.table(found)
    assert sums.goals(found).splitlines()[0] == "int8: goal 1.5x from 1 MiB up, least measured 2.00x."
    sums.draw(found, "title", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_perplexities_are_paired_with_the_unquantized(tmp_path: Path) -> None:
    settings = perplexity.settings()
    assert settings[0].output_projection == "none" and len(settings) == 1 + 2 * 3 * 3 + 2
    plain = [1.0, 2.0, 3.0]
    losses = [plain] + [[x + 0.01 * number + 0.001 * x for x in plain] for number in range(1, len(settings))]
    found = perplexity.findings(losses)
    assert found[0].perplexity == pytest.approx(math.exp(2.0)) and found[0].more == found[0].noise == 0
    assert found[3].more == pytest.approx(0.032) and found[3].noise == pytest.approx(0.001 / math.sqrt(3))
    rows = perplexity.table(found).splitlines()
    assert len(rows) == 2 + len(settings) and rows[2].startswith("| none |  |  | 7.3891 |")
    assert "| int4 output projection, none down projection | 128 | asymmetric |" in rows[-2]
    kv = perplexity.kv_table([plain, [x + 0.5 for x in plain]])
    assert kv.endswith("| exact | 7.3891 | |\n| 8-bit | 12.1825 | +0.50000 ± 0.00000 |")
    perplexity.draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_held_out_text_has_no_part_in_training() -> None:
    windows = perplexity.held_out(build_tokenizer("byte-level", None), 128, 16)
    assert windows.shape == (16, 129) and windows.dtype == torch.int64
    assert len({tuple(window.tolist()) for window in windows}) == 16
