"""Logits with a large common offset: the error rule for out, dk and dv, and for dq as far as an fp32 lse goes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.kernels import KernelRequest, choose
from megatron_longctx.layout import Layout
from megatron_longctx.schedules import SCHEDULES
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, kernel_attention, random_qkv, shard, unshard
from megatron_longctx.testing.tolerances import assert_as_good_as, lse_rounding

LENGTH, HEADS, DIM, RANKS = 128, 4, 16, 4
OFFSETS = (0.0, 1e2, 1e3)
MODES = [name for name in SCHEDULES if name not in ("usp", "double_ring")]


def tensors(offset: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All logits are off by about this, since keys have a component in common."""
    q, k, v, grad_out = random_qkv(LENGTH, 1, HEADS, HEADS, DIM, torch.float32)
    if offset:
        q[..., 0], k[..., 0] = 4.0, offset / 4 * DIM**0.5
    return q, k, v, grad_out


def _results(rank: int) -> dict[tuple[str, float], tuple[Layout, dict[str, Tensor]]]:
    found = {}
    for mode in MODES:
        attention = ContextParallelAttention(dist.group.WORLD, schedule=mode)
        layout = attention.layout(LENGTH)
        for offset in OFFSETS:
            *leaves, grad_out = (shard(x, layout, rank) for x in tensors(offset))
            out = attention(*(x.requires_grad_() for x in leaves), length=LENGTH)
            grads = torch.autograd.grad(out, leaves, grad_out)
            found[mode, offset] = layout, dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    return found


def test_errors_grow_by_what_an_lse_is_rounded_by_and_no_more() -> None:
    ranks = run_distributed(_results, RANKS)
    kernel = choose("auto", KernelRequest("cpu", torch.float32, DIM, HEADS, HEADS))
    for offset in OFFSETS:
        given = tensors(offset)
        truth, own = dense_attention(*given, causal=True), kernel_attention(kernel, *given, causal=True)
        beyond = lse_rounding(*given, causal=True)
        for mode in MODES:
            layout = ranks[0][mode, offset][0]
            found = {name: unshard([each[mode, offset][1][name] for each in ranks], layout) for name in truth}
            assert_as_good_as(found, own, truth, (mode, offset), beyond)
            if offset == 0:
                assert_as_good_as(found, own, truth, mode)
        assert beyond["dq"] < 0.2 * float(truth["dq"].norm()), "a bound that says something"


def test_the_bound_grows_with_the_offset_twice_over() -> None:
    """By the lse, and by the keys' common component that it keeps from dropping out."""
    small, large = (lse_rounding(*tensors(offset), causal=True)["dq"] for offset in OFFSETS[1:])
    assert large / small == pytest.approx((OFFSETS[2] / OFFSETS[1]) ** 2, rel=0.1)
