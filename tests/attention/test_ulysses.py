"""Ulysses: ranks that share the heads, where their number fits them, and refused where it does not."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.attention.executor import head_slice
from megatron_longctx.schedules import Heads, build_plan, check_heads, seal, transpose, verify
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention

HEADS = {2: ((4, 4), (4, 2), (4, 1)), 3: ((6, 3), (6, 1)), 4: ((8, 8), (8, 2), (4, 1))}


def worst_error(rank: int) -> float:
    n = dist.get_world_size()
    attention = ContextParallelAttention(dist.group.WORLD, schedule="ulysses", kernel="reference")
    worst = 0.0
    for (h, g), length, causal in product(HEADS[n], (4 * n, 4 * n + 1, n - 1), (True, False)):
        torch.manual_seed(length)
        whole = [torch.randn(length, 2, heads, 8, dtype=torch.float64) for heads in (h, g, g)]
        grad = torch.randn(length, 2, h, 8, dtype=torch.float64)
        expected = dense_attention(*whole, grad, causal)
        mine = list(attention.layout(length).tokens(rank))
        local = [x[mine].clone().requires_grad_() for x in whole]
        result = attention(*local, length=length, causal=causal)
        result.backward(grad[mine])
        actual = {"out": result, **{name: x.grad for name, x in zip(("dq", "dk", "dv"), local, strict=True)}}
        for name, x in actual.items() if mine else ():
            worst = max(worst, (x - expected[name][mine]).abs().max().item())
    return worst


@pytest.mark.parametrize("n", [2, 3, 4])
def test_equals_dense_attention(n: int) -> None:
    assert max(run_distributed(worst_error, n)) < 1e-12


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_plan_is_proved_forward_and_backward(n: int, causal: bool) -> None:
    for length in (0, 1, n, 4 * n + 3):
        plan = build_plan("ulysses", n, length, causal)
        verify(plan)
        verify(seal(transpose(plan)))


def test_one_call_a_rank_and_balanced() -> None:
    plan = build_plan("ulysses", 4, 64)
    assert [sum(len(step.attends[rank]) for step in plan.steps) for rank in range(4)] == [1] * 4
    assert plan.idle_fraction() == 0


def test_heads_in_parts() -> None:
    assert head_slice(8, Heads(1, 4)) == slice(2, 4)
    assert [head_slice(2, Heads(i, 4)) for i in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    with pytest.raises(ValueError, match="3 heads in 4 parts"):
        head_slice(3, Heads(0, 4))


def test_numbers_of_ranks_that_do_not_fit_are_refused() -> None:
    check_heads("ulysses", 16, 32, 8)
    check_heads("zigzag", 5, 32, 8)
    with pytest.raises(ValueError, match=r"5 context-parallel ranks with schedule ulysses.*Nearest: 4, 2, 8"):
        check_heads("ulysses", 5, 32, 8)
    with pytest.raises(ValueError, match="divisor of the 4 query heads"):
        check_heads("ulysses", 8, 4, 2)
