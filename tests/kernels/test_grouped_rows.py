"""Heads of a group as rows of one: the same attention, in fewer tiles."""

from __future__ import annotations

import pytest
import torch

from megatron_longctx.kernels import KernelRequest, choose, grouped_rows
from megatron_longctx.kernels.cudnn import CudnnKernel
from megatron_longctx.kernels.flash import FlashKernel
from megatron_longctx.kernels.grouped_rows import as_heads, as_rows, worth_rows
from megatron_longctx.kernels.interface import Block

HEADS = [(8, 2), (6, 3), (4, 4), (8, 1)]


def blocks(heads: int, kv_heads: int, queries: int = 5, keys: int = 11) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return tuple(torch.randn(tokens, 2, count, 16, generator=gen, dtype=torch.float64) for tokens, count in sizes)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_attention_of_the_rows_is_that_of_the_heads(heads: int, kv_heads: int) -> None:
    kernel = choose("reference", KernelRequest("cpu", torch.float64, 16, heads, kv_heads))
    q, k, v = blocks(heads, kv_heads)
    out, lse = kernel.forward(q, k, v, causal=False, scale=0.25)
    rows = as_rows(q, kv_heads)
    assert rows.shape == (5 * heads // kv_heads, 2, kv_heads, 16)
    found, found_lse = kernel.forward(rows, k, v, causal=False, scale=0.25)
    torch.testing.assert_close(as_heads(found, 5), out)
    torch.testing.assert_close(as_heads(found_lse, 5), lse)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_there_and_back(heads: int, kv_heads: int) -> None:
    q, _, _ = blocks(heads, kv_heads)
    assert torch.equal(as_heads(as_rows(q, kv_heads), 5), q)
    assert torch.equal(as_heads(as_rows(q, kv_heads)[..., 0], 5), q[..., 0])


def test_where_it_pays() -> None:
    """Few queries over so many keys that the device takes longer than the host."""
    long = 2**18
    assert [worth_rows(queries, long, (32, 8), 128) for queries in (1, 16, 64, 65, 100, 112, 128, 164)] == [
        True, True, False, True, True, True, False, True,
    ]  # fmt: skip
    assert not any(worth_rows(queries, long, (8, 8), 128) for queries in range(1, 300))
    assert [worth_rows(16, keys, (32, 8), 128) for keys in (17, 32752, 2**16, long)] == [False, False, True, True]


def test_only_where_shapes_vary_nothing_is_masked_and_keys_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def attend(self: FlashKernel, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(block.q.shape))
        return block.q, block.q[..., 0]

    monkeypatch.setattr(FlashKernel, "_attend", attend)
    q, k, _ = blocks(8, 2)
    many, square = k[:1].expand(2**21, *k.shape[1:]), q[:, :, :2]
    for varying, causal, keys in (
        (False, False, many), (True, False, many), (True, False, k), (True, True, square),
    ):  # fmt: skip
        out, lse = FlashKernel(varying=varying)._forward(Block(q, keys, keys, causal, 0.25))
        assert torch.equal(out, q) and torch.equal(lse, q[..., 0])
    assert seen == [(5, 2, 8, 16), (20, 2, 2, 16), (5, 2, 8, 16), (5, 2, 8, 16)]


def test_cudnn_hands_on_that_shapes_vary() -> None:
    """What cuDNN does not plan goes to flash, and there by the same rule."""
    for varying in (False, True):
        unplanned = CudnnKernel(varying=varying)._unplanned
        assert isinstance(unplanned, FlashKernel) and unplanned.varying is varying


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("queries", [1, 5, 12, 65, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1)])
def test_flash_gives_the_same_either_way_on_a_gpu(
    heads: int, kv_heads: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_rows, "_LEAST_SAVED", 1.0)  # these blocks are small
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(tokens, 1, count, 128, generator=gen, device="cuda", dtype=torch.bfloat16)
        for tokens, count in ((queries, heads), (5000, kv_heads), (5000, kv_heads))
    )
    out, lse = FlashKernel().forward(q, k, v, causal=False, scale=0.1)
    found, found_lse = FlashKernel(varying=True).forward(q, k, v, causal=False, scale=0.1)
    assert found.shape == out.shape and found_lse.shape == lse.shape
    torch.testing.assert_close(found_lse, lse, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.float(), out.float(), rtol=2e-2, atol=2e-3)
