"""`python -m analysis.benchmarks attention` on CPU: its results are complete and right."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analysis.benchmarks.__main__ import main
from analysis.benchmarks.cases import Case, cases, packs
from analysis.benchmarks.measure import Bench, Contender, Measurement, Prepared, dense, short, wrong
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.ranks import world_group

CASE = Case((24, 8), 4, 2, 8, 4)


def test_masks_are_measured_with_one_device_and_peers(tmp_path: Path) -> None:
    out = tmp_path / "modes.json"
    masks = ["causal", "full", "window=20", "documents=32:16:48", "documents=3@7+window=9"]
    words = f"--device cpu --ranks 2 --masks {','.join(masks)} --lengths 96 --heads 4:2 --head-dim 16 --dtype fp32"
    words += " --iterations 1 --check --peers --modes zigzag"
    assert main(["attention", *words.split(), "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    found = {(m["mask"], m["name"]): m for m in data["measurements"]}
    for mask in masks:
        for name in ("one CPU, cpu", "zigzag", "NCCL Ulysses"):
            m = found[mask, name]
            assert len(m["rounds"]) == 3 and 0 < min(m["rounds"]) <= m["seconds"] and m["tflops"] > 0
            assert set(m["errors"]) == {"out", "dq", "dk", "dv"} and max(m["errors"].values()) < 1e-5
            alone, mode = (found[mask, other]["seconds"] for other in ("one CPU, cpu", "zigzag"))
            assert m["percent_of_one_device"] == pytest.approx(100 * alone / m["seconds"])
            assert m["times_fastest_mode"] == pytest.approx(m["seconds"] / mode)
    assert found["full", "ring-flash-attn, zigzag"]["reason"] == "mask full: expected causal"
    assert data["ranks"] == 2 and data["configuration"]["iterations"] == 1 and data["cases"][0]["pairs"] == 96 * 97 / 2
    assert {"commit", "date", "device"} <= set(data["environment"])
    assert sum(data["cases"][4]["documents"]) == 96
    assert all(line in out.with_suffix(".md").read_text() for line in data["notes"] + data["absent"])


def test_packs_are_the_published_ones() -> None:
    found = packs()
    assert {name: (len(pack), sum(pack)) for name, pack in found.items()} == {
        "24": (24, 2**16), "6": (6, 2**16), "15": (15, 2**17), "64x1K": (64, 2**16), "magi": (5, 2**17),
    }  # fmt: skip
    longest = {"24": 13_564, "6": 15_533, "15": 32_419}
    assert all(abs(max(found[name]) - length) <= 8 for name, length in longest.items())
    assert all(length % 16 == 0 for pack in found.values() for length in pack) and max(found["magi"]) == 2**15
    (case,) = cases("pack=6+window=4096", "1", "32:8", 128, "bf16")
    assert case.documents == found["6"] and case.window == 4096


def test_the_same_seed_draws_the_same_pack() -> None:
    first, second = (cases(f"documents=24@{seed}", "65536", "32:8", 128, "bf16")[0] for seed in (7, 8))
    assert first == cases("documents=24@7", "65536", "32:8", 128, "bf16")[0] and first.documents != second.documents
    assert len(first.documents) == 24 and first.length == 65536 and not any(n % 16 for n in first.documents)
    assert first.flops == 3.5 * 4 * sum(n * (n + 1) / 2 for n in first.documents) * 32 * 128


def test_one_device_computes_its_share_of_the_flops() -> None:
    for name in ("causal", "full", "window=1000"):
        (case,) = cases(name, "65536", "32:8", 128, "bf16")
        assert case.share(4).flops == pytest.approx(case.flops / 4, rel=0.01)
    assert CASE.share(4) == CASE


@pytest.mark.parametrize("name", ["causal", "full", "causal+window=5", "full+window=5"])
def test_the_reference_agrees_with_the_mask(name: str) -> None:
    case = replace(cases(name, "32", "4:2", 8, "fp32")[0], documents=(24, 8))
    inputs = [x.double().requires_grad_() for x in case.inputs(torch.device("cpu"))]
    out = ContextParallelAttention(kernel="reference")(*inputs[:3], mask=case.mask)
    grads = torch.autograd.grad(out, inputs[:3], inputs[3])
    for expected, found in zip(dense(case, inputs).values(), (out, *grads), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_long_case_is_checked_by_a_similar_short_one() -> None:
    (long,) = cases("documents=64000:320:1216+window=640", "", "4:2", 8, "bf16")
    found = short(long, 8)
    assert found.documents == (2000, 16, 32) and found.window == 20
    assert short(CASE, 3) == CASE


def _judged(rank: int) -> list[Measurement]:
    group = world_group()

    def too_much(case: Case) -> Prepared:
        return Prepared(lambda q, k, v: 1.1 * ContextParallelAttention()(q, k, v, mask=case.mask), range(case.length))

    def refused(case: Case) -> Prepared:
        raise RuntimeError("no\nluck")

    contenders = [Contender("wrong", too_much, ours=True), Contender("refused", refused)]
    return Bench(group, torch.device("cpu"), 1, check=True).run(CASE, contenders)


def test_wrong_results_are_not_timed() -> None:
    for judged, refused in run_distributed(_judged, 2):
        assert judged.reason == "wrong results" and judged.seconds is None
        assert judged.errors is not None and judged.errors["out"] == pytest.approx(0.1, rel=1e-3)
        assert refused.reason == "RuntimeError: no"
    assert wrong({"out": 0.0, "dq": float("nan")}, torch.float32) and not wrong({"out": 1e-6}, torch.float32)
