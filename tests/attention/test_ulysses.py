"""Ulysses and USP: ranks that share the heads, where their number fits them, and refused where it does not."""

from __future__ import annotations

import functools
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.attention.program import programs
from megatron_longctx.attention.shapes import head_slice
from megatron_longctx.config import OUTER_SCHEDULES
from megatron_longctx.layout import striped
from megatron_longctx.schedules import (
    RESULTS,
    Heads,
    Kind,
    PlanOptions,
    backward_plan,
    build_plan,
    check_heads,
    keeping,
    seal,
    transpose,
    verify,
)
from megatron_longctx.schedules.ring import ring
from megatron_longctx.schedules.usp import usp
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention

HEADS = {
    1: ((4, 4), (4, 2), (4, 1)),
    2: ((4, 4), (4, 2), (4, 1)),
    3: ((6, 6), (6, 3), (6, 1)),
    4: ((8, 8), (8, 2), (4, 1)),
    5: ((10, 10), (10, 5), (5, 1)),
    6: ((6, 6), (12, 6), (6, 1)),
    8: ((8, 8), (16, 4), (8, 1)),
}
"""MHA, GQA and MQA, by the number of ranks that share the heads."""


Pairs = tuple[tuple[int, int], ...]


@functools.cache
def problem(h: int, g: int, length: int, causal: bool) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Queries, keys and values, the gradient of the output, and what dense attention makes of them."""
    torch.manual_seed(length)
    whole = [torch.randn(length, 2, heads, 8, dtype=torch.float64) for heads in (h, g, g)]
    grad = torch.randn(length, 2, h, 8, dtype=torch.float64)
    return whole, grad, dense_attention(*whole, grad, causal)


def worst_error(rank: int, schedule: str, cases: list[tuple[PlanOptions, Pairs]]) -> float:
    """Largest difference of any output or gradient from the fp64 reference, over all cases (options, heads)."""
    return max(worst_of(rank, schedule, options, heads) for options, heads in cases)


def worst_of(rank: int, schedule: str, options: PlanOptions, heads: Pairs) -> float:
    n = dist.get_world_size()
    attention = ContextParallelAttention(dist.group.WORLD, schedule=schedule, kernel="reference", options=options)
    worst = 0.0
    for (h, g), length, causal in product(heads, (4 * n, 4 * n + 1, n - 1), (True, False)):
        whole, grad, expected = problem(h, g, length, causal)
        mine = list(attention.layout(length).tokens(rank))
        local = [x[mine].clone().requires_grad_() for x in whole]
        result = attention(*local, length=length, causal=causal)
        result.backward(grad[mine])
        actual = {"out": result, **{name: x.grad for name, x in zip(("dq", "dk", "dv"), local, strict=True)}}
        for name, x in actual.items() if mine else ():
            worst = max(worst, (x - expected[name][mine]).abs().max().item())
    return worst


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8])
def test_ulysses_equals_dense_attention(n: int) -> None:
    assert max(run_distributed(worst_error, n, "ulysses", [(PlanOptions(), HEADS[n])])) < 1e-12


CHUNKED = {1: ((4, 2),), 2: ((4, 4), (8, 4)), 3: ((6, 6),), 4: ((8, 8), (16, 8))}
"""MHA and GQA, by the number of ranks: heads for two chunks a rank."""


@pytest.mark.parametrize("n", CHUNKED)
def test_chunks_of_the_heads_equal_dense_attention(n: int) -> None:
    cases = [(PlanOptions(head_chunks=2), CHUNKED[n])]
    cases += [(PlanOptions(head_chunks=4), ((8, 8), (16, 8)))] if n == 2 else []
    assert max(run_distributed(worst_error, n, "ulysses", cases)) < 1e-12


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8])
def test_usp_equals_dense_attention(n: int) -> None:
    """Every size of a group with every mode around the groups (n=4: with all heads; n=6: most with one kind)."""
    cases = []
    for sharing in (size for size in range(1, n + 1) if n % size == 0):
        for i, outer in enumerate(OUTER_SCHEDULES if n in (4, 6) else ("zigzag", "helper")):
            by_turns = n == 6 and outer not in ("zigzag", "helper")
            heads = HEADS[sharing][i % 3 :][:1] if by_turns else HEADS[sharing]
            cases.append((PlanOptions(inner_size=sharing, outer_schedule=outer), heads))
    assert max(run_distributed(worst_error, n, "usp", cases)) < 1e-12


@pytest.mark.parametrize("n", [1, 2, 4, 6, 7, 8, 12])
@pytest.mark.parametrize("outer", OUTER_SCHEDULES)
def test_usp_is_proved_forward_and_backward(n: int, outer: str) -> None:
    for sharing, length, causal in product(range(1, n + 1), (0, 1, n + 1, 4 * n + 3), (True, False)):
        if n % sharing == 0:
            plan = build_plan("usp", n, length, causal, PlanOptions(inner_size=sharing, outer_schedule=outer))
            verify(plan)
            verify(seal(transpose(plan)))


def test_usp_sends_one_output_home_for_each_part_of_the_heads() -> None:
    """However many blocks a rank attends: they are merged where they are computed."""
    plan = build_plan("usp", 8, 64 * 8, True, PlanOptions(inner_size=2))
    for each, kind in ((plan, Kind.OUT), (transpose(plan), Kind.DQ)):
        moves = [move for step in each.steps for move in step.moves if move.block.kind is kind]
        assert sum(move.block.tokens for move in moves) == 8 * 64


def test_usp_of_one_group_is_ulysses_and_of_single_ranks_its_outer_mode() -> None:
    whole, apart = (build_plan("usp", 4, 64, True, PlanOptions(inner_size=size)) for size in (4, 1))
    assert [[len(attends) for attends in step.attends] for step in whole.steps if any(step.attends)] == [[1] * 4]
    assert apart.steps == build_plan("zigzag", 4, 64).steps


def test_groups_that_do_not_divide_the_ranks_or_whose_tokens_lie_apart_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inner_size=3: expected a divisor of the 8 ranks.*1, 2, 4, 8"):
        build_plan("usp", 8, 64, True, PlanOptions(inner_size=3))
    with pytest.raises(ValueError, match=r"layout striped: expected ranks 0\.\.1 to hold neighbouring tokens"):
        usp(striped(4, 16), True, 2, ring)
    with pytest.raises(ValueError, match="schedule 'ulysses': expected one of ring, zigzag"):
        build_plan("usp", 8, 64, True, PlanOptions(outer_schedule="ulysses"))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_plan_is_proved_forward_and_backward(n: int, causal: bool) -> None:
    for length, chunks in product((0, 1, n, 4 * n + 3), (1, 2, 3)):
        plan = build_plan("ulysses", n, length, causal, PlanOptions(head_chunks=chunks))
        verify(plan)
        verify(seal(transpose(plan)))


def test_one_call_a_rank_and_balanced() -> None:
    plan = build_plan("ulysses", 4, 64)
    assert [sum(len(step.attends[rank]) for step in plan.steps) for rank in range(4)] == [1] * 4
    assert plan.idle_fraction() == 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_all_but_the_first_and_the_last_exchange_of_chunks_run_beside_attention(backward: bool, kept: bool) -> None:
    """Of three chunks two arrive, and the results of two return, while another is attended."""
    plan = build_plan("ulysses", 4, 64, options=PlanOptions(head_chunks=3))
    plan = keeping(plan) if kept else plan
    plan = backward_plan(plan) if backward else plan
    first, *middle, last = plan.steps
    assert not any(first.attends) and not any(last.attends)
    assert [[len(calls) for calls in step.attends] for step in middle] == [[1] * 4] * 3
    assert all(step.moves for step in plan.steps)
    results = [sum(move.block.kind in RESULTS for move in step.moves) for step in plan.steps]
    assert results == [0, 0, *[results[-1]] * 3] and results[-1] > 0


def test_heads_in_parts() -> None:
    assert head_slice(8, Heads(1, 4)) == slice(2, 4)
    assert [head_slice(2, Heads(i, 4)) for i in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    with pytest.raises(ValueError, match="3 heads in 4 parts"):
        head_slice(3, Heads(0, 4))


def test_numbers_of_ranks_that_do_not_fit_are_refused() -> None:
    check_heads("ulysses", 16, 32, 8)
    check_heads("zigzag", 5, 32, 8)
    check_heads("usp", 12, 32, 8, PlanOptions(inner_size=4))
    with pytest.raises(ValueError, match=r"12 context-parallel ranks that share.*Nearest inner_size: 4, 2, 1\. Set it"):
        check_heads("usp", 12, 32, 8, PlanOptions(inner_size=12))
    with pytest.raises(ValueError, match=r"5 context-parallel ranks that share.*ulysses.*Nearest ranks: 4, 2, 8"):
        check_heads("ulysses", 5, 32, 8)
    with pytest.raises(ValueError, match="divisor of the 4 query heads"):
        check_heads("ulysses", 8, 4, 2)
    check_heads("ulysses", 4, 32, 8, PlanOptions(head_chunks=2))
    with pytest.raises(ValueError, match=r"head_chunks=3: expected a number .* 4 ranks .* 8 key.*one of 1, 2\."):
        check_heads("ulysses", 4, 32, 8, PlanOptions(head_chunks=3))
    with pytest.raises(ValueError, match=r"head_chunks=2: .*8 ranks .* 4 key/value heads. Choose one of 1\."):
        check_heads("ulysses", 8, 32, 4, PlanOptions(head_chunks=2))


def test_own_rows_that_stay_neighbours_are_copied_together() -> None:
    """Whatever the number of blocks that they are sent in."""
    for way, kinds in enumerate(((Kind.Q, Kind.KV), (Kind.Q_GRAD, Kind.KV))):
        program = programs(build_plan("usp", 4, 256, True, PlanOptions(inner_size=2)), 1)[way]
        sources = [copy.source for step in program.steps for copy in step.copies]
        assert [(place.kind, place.start, place.stop) for place in sources] == [(kind, 0, 64) for kind in kinds]
