"""ring-flash-attn's schedules on this project's kernels: exact, on any number of ranks, and leaving nothing behind."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.bench.attention import Case
from megatron_longctx.bench.flash_attn_interface import functions
from megatron_longctx.bench.ring_package import FLASH, RING, load, ring_flash_attn
from megatron_longctx.kernels import KernelRequest, choose
from megatron_longctx.layout import build_layout
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, kernel_attention, random_qkv, shard, unshard
from megatron_longctx.testing.tolerances import assert_as_good_as, relative_error

SCALE = 0.3
H, G, D = 4, 2, 8

needs_package = pytest.mark.skipif(importlib.util.find_spec(RING) is None, reason="ring-flash-attn is not installed")


def _buffers(*like: Tensor) -> list[Tensor]:
    """Parts of larger ones, full of values that must not stay."""
    return [torch.full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan, dtype=x.dtype)[:, 1:-2] for x in like]


@pytest.mark.parametrize(("s", "t", "causal"), [(12, 12, True), (12, 12, False), (5, 12, False), (5, 12, True)])
def test_the_batched_functions_write_gradients_into_the_buffers_they_are_given(s: int, t: int, causal: bool) -> None:
    whole = random_qkv(t, 2, H, G, D, torch.float64)
    q, k, v, dout = (x.transpose(0, 1) for x in whole)
    q, dout = q[:, t - s :], dout[:, t - s :]
    given = functions("reference")
    plain: dict[str, Any] = {"softmax_scale": SCALE, "causal": causal, "dropout_p": 0.0, "alibi_slopes": None}
    plain |= {"window_size_left": -1, "window_size_right": -1}
    out, lse, *none = given["_flash_attn_forward"](q=q, k=k, v=v, return_softmax=False, **plain)
    assert none == [None, None] and lse.shape == (2, H, s)
    gradients = dict(zip(("dq", "dk", "dv"), _buffers(q, k, v), strict=True))
    given["_flash_attn_backward"](
        dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, deterministic=False, **gradients, **plain
    )
    # Queries before these give nothing to any gradient where theirs of out are 0.
    silent = torch.cat([torch.zeros_like(whole[3][: t - s]), whole[3][t - s :]])
    truth = dense_attention(*whole[:3], silent, causal, SCALE)
    for name, found in {"out": out, **gradients}.items():
        rows = slice(t - s, None) if name in ("out", "dq") else slice(None)
        assert relative_error(found.transpose(0, 1), truth[name][rows]) < 1e-12, name


@pytest.mark.parametrize("s", [4, 12])
def test_the_packed_functions_align_a_causal_mask_at_the_end(s: int) -> None:
    t = 12
    whole = random_qkv(t, 1, H, G, D, torch.float64)
    q, k, v, dout = (x.squeeze(1) for x in whole)
    q, dout = q[t - s :], dout[t - s :]
    given = functions("reference")
    where = {"cu_seqlens_q": torch.tensor([0, s]), "cu_seqlens_k": torch.tensor([0, t])}
    plain: dict[str, Any] = {"softmax_scale": SCALE, "causal": True, "max_seqlen_q": s, "max_seqlen_k": t, **where}
    out, lse, *_ = given["_flash_attn_varlen_forward"](q=q, k=k, v=v, **plain)
    assert lse.shape == (H, s)
    gradients = dict(zip(("dq", "dk", "dv"), _buffers(q, k, v), strict=True))
    given["_flash_attn_varlen_backward"](dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, **gradients, **plain)
    silent = torch.cat([torch.zeros_like(whole[3][: t - s]), whole[3][t - s :]])
    truth = dense_attention(*whole[:3], silent, True, SCALE)
    for name, found in {"out": out, **gradients}.items():
        rows = slice(t - s, None) if name in ("out", "dq") else slice(None)
        assert relative_error(found.unsqueeze(1), truth[name][rows]) < 1e-12, name


def test_what_these_kernels_cannot_do_is_refused() -> None:
    q, k, v, _ = (x.squeeze(1) for x in random_qkv(12, 1, H, G, D, torch.float32))
    given = functions("auto")
    plain: dict[str, Any] = {"softmax_scale": SCALE, "causal": True}
    batched = {name: x.unsqueeze(0) for name, x in (("q", q), ("k", k), ("v", v))}
    for word, value in (("dropout_p", 0.1), ("window_size_left", 5), ("softcap", 1.0), ("block_table", "")):
        with pytest.raises(ValueError, match=rf"{word}=.*: expected"):
            given["_flash_attn_forward"](**batched, **plain, **{word: value})
    with pytest.raises(ValueError, match="12 queries and 8 keys"):
        given["_flash_attn_forward"](q=batched["q"], k=batched["k"][:, :8], v=batched["v"][:, :8], **plain)
    two = {"cu_seqlens_q": torch.tensor([0, 6, 12]), "cu_seqlens_k": torch.tensor([0, 6, 12])}
    with pytest.raises(ValueError, match="2 sequences of up to"):
        given["_flash_attn_varlen_forward"](q=q, k=k, v=v, **plain, **two, max_seqlen_q=6, max_seqlen_k=6)


def _attended(rank: int, case: Case) -> dict[str, dict[str, Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    whole = random_qkv(case.length, 1, case.num_heads, case.num_kv_heads, case.head_dim, torch.bfloat16)
    found = {}
    for contender in ring_flash_attn(group, "cpu"):
        call, layout = contender.make(case)
        *leaves, grad_out = (shard(x, layout, rank) for x in whole)
        q, k, v = (x.requires_grad_() for x in leaves)
        out = call(q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), grad_out)
        found[contender.name] = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
    return found


@needs_package
@pytest.mark.parametrize(("world", "case"), [(2, Case(48, 4, 2, 16)), (4, Case(64, 4, 4, 16)), (3, Case(54, 6, 6, 16))])
def test_its_modes_give_the_attention_of_one_rank(world: int, case: Case) -> None:
    ranks = run_distributed(_attended, world, case)
    whole = random_qkv(case.length, 1, case.num_heads, case.num_kv_heads, case.head_dim, torch.bfloat16)
    truth = dense_attention(*whole, True)
    kernel = choose("cpu", KernelRequest("cpu", torch.bfloat16, case.head_dim, case.num_heads, case.num_kv_heads))
    own = kernel_attention(kernel, *whole, True)
    names = [f"ring-flash-attn, {mode}" for mode in ("zigzag", "ring", "llama3")]
    assert all(list(found) == names for found in ranks)
    for name in names:
        layout = build_layout("zigzag" if "zigzag" in name else "contiguous", world, case.length)
        joined = {part: unshard([found[name][part] for found in ranks], layout) for part in truth}
        assert_as_good_as(joined, own, truth, name)


def _refused(rank: int) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    said = []
    for contender in ring_flash_attn(group, "cpu"):
        for case in (Case(25, 4, 2, 16), Case(48, 4, 2, 16, element_bytes=4)):
            with pytest.raises(ValueError) as error:
                contender.make(case)
            said.append(str(error.value))
    return said


@needs_package
def test_what_it_does_not_take_is_refused() -> None:
    for said in run_distributed(_refused, 2):
        assert set(said[1::2]) == {"fp32: expected bf16"}
        assert said[0::2] == [f"25 tokens: expected a multiple of {n}" for n in (4, 2, 2)]


@needs_package
def test_no_stand_in_is_left_where_others_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def concerned() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] in (RING, FLASH)}

    for already in ({}, {FLASH: ModuleType(FLASH), f"{FLASH}.utils": ModuleType(f"{FLASH}.utils")}):
        for name, module in already.items():
            monkeypatch.setitem(sys.modules, name, module)
        before = concerned()
        first, second = load("cpu")[0], load("reference")[0]
        assert concerned() == before
        assert first._flash_attn_forward is not second._flash_attn_forward
        assert first._flash_attn_forward.__module__ == "megatron_longctx.bench.flash_attn_interface"
