"""Other packages in the attention benchmark: their results are right, and absent ones are named with a reason."""

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from analysis.benchmarks.cases import Case
from analysis.benchmarks.measure import Bench, Measurement, dense
from analysis.benchmarks.peers import peers, ring_flash_attn
from analysis.benchmarks.peers.flash_attn import functions
from analysis.benchmarks.peers.transformer_engine import ENGINE
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.ranks import world_group

CASE = Case((48,), 4, 2, 16)
PACK = replace(CASE, documents=(24, 8, 16), name="pack")
CPU = torch.device("cpu")
NO_RING = importlib.util.find_spec("ring_flash_attn") is None
needs_ring = pytest.mark.skipif(NO_RING, reason="ring-flash-attn is not installed")


def _ring(rank: int, cases: list[Case]) -> list[list[Measurement]]:
    bench = Bench(world_group(), CPU, 1, check=True)
    return [bench.run(case, ring_flash_attn.contenders(world_group(), "cpu")) for case in cases]


@needs_ring
def test_ring_flash_attn_is_right_on_these_kernels_or_refuses_a_case() -> None:
    full = replace(CASE, causal=False, name="full")
    fp32, odd = replace(CASE, element_bytes=4), replace(CASE, documents=(25,))
    for causal, packed, full_mask, *refused in run_distributed(_ring, 2, [CASE, PACK, full, fp32, odd]):
        assert [m.name.split(", ")[1] for m in causal] == ["zigzag", "ring", "llama3"]
        for m in (*causal, packed[2], *full_mask[1:]):  # wrong results have no time
            assert m.seconds and m.errors and not m.reason, m
        assert {m.reason for m in packed[:2]} == {"mask pack: expected causal", "mask pack: expected causal or full"}
        assert [{m.reason for m in found} for found in refused] == [
            {"fp32: expected bf16"},
            {"25 tokens: expected a multiple of 4", "25 tokens: expected a multiple of 2"},
        ]


@needs_ring
def test_no_stand_in_stays_in_sys_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced() -> dict[str, ModuleType]:
        return {name: m for name, m in sys.modules.items() if name.split(".")[0] in ("ring_flash_attn", "flash_attn")}

    for already in ({}, {"flash_attn": ModuleType("flash_attn"), "flash_attn.utils": ModuleType("flash_attn.utils")}):
        for name, module in already.items():
            monkeypatch.setitem(sys.modules, name, module)
        before = replaced()
        first, second = ring_flash_attn.load("cpu")[0], ring_flash_attn.load("reference")[0]
        assert replaced() == before
        assert first._flash_attn_forward is not second._flash_attn_forward
        assert first._flash_attn_forward.__module__ == "analysis.benchmarks.peers.flash_attn"


def test_gradients_are_written_into_the_given_buffers() -> None:
    inputs = PACK.inputs(CPU)
    q, k, v, dout = (x.double().squeeze(1) for x in inputs)
    given, starts = functions("reference"), torch.tensor([0, 24, 32, 48])
    rest: dict[str, Any] = {"softmax_scale": 16**-0.5, "causal": True, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    out, lse, *none = given["_flash_attn_varlen_forward"](q=q, k=k, v=v, **rest)
    assert none == [None, None] and lse.shape == (4, 48)
    found = {"out": out}
    for name, like in (("dq", q), ("dk", k), ("dv", v)):  # parts of larger tensors of NaN, which must be overwritten
        found[name] = torch.full((like.shape[0] + 3, *like.shape[1:]), torch.nan, dtype=like.dtype)[1:-2]
    gradients = {name: x for name, x in found.items() if name != "out"}
    given["_flash_attn_varlen_backward"](dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, **gradients, **rest)
    for name, truth in dense(PACK, inputs).items():
        torch.testing.assert_close(found[name].unsqueeze(1), truth)


class _Whole(torch.autograd.Function):
    """Joins the shards `[s, b, heads, d]` of ranks as TransformerEngine documents them: of 2n parts, rank r has r and
    2n - 1 - r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        pairs = [part.chunk(2) for part in parts]
        return torch.cat([front for front, _ in pairs] + [back for _, back in reversed(pairs)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        dist.all_reduce(grads[0])
        return _mine(grads[0])


def _mine(x: Tensor) -> Tensor:
    n, rank, parts = dist.get_world_size(), dist.get_rank(), x.chunk(2 * dist.get_world_size())
    return torch.cat([parts[rank], parts[2 * n - 1 - rank]])


class _DotProductAttention:
    """Has the documented interface of TransformerEngine's class of this name."""

    def __init__(self, num_attention_heads: int, kv_channels: int, **options: Any) -> None:
        assert (num_attention_heads, kv_channels, options["num_gqa_groups"]) == (4, 16, 2)
        assert (options["qkv_format"], options["attn_mask_type"]) == ("sbhd", "causal")
        assert options["attention_dropout"] == 0.0

    def set_context_parallel_group(self, group: Any, ranks: list[int], stream: Any, kind: str) -> None:
        assert ranks == [0, 1] and kind in ("p2p", "all_gather", "a2a")

    def __call__(self, *qkv: Tensor) -> Tensor:
        q, k, v = (_Whole.apply(x).permute(1, 2, 0, 3).float() for x in qkv)  # type: ignore[no-untyped-call]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return _mine(out.permute(2, 0, 1, 3)).to(qkv[0].dtype).flatten(2)


def _engine(rank: int) -> tuple[list[str], list[Measurement], list[Measurement], list[str]]:
    absent = peers(world_group(), "cpu").absent
    sys.modules["transformer_engine"] = ModuleType("transformer_engine")
    sys.modules[ENGINE] = SimpleNamespace(DotProductAttention=_DotProductAttention)  # type: ignore[assignment]
    contenders = [c for c in peers(world_group(), "cpu").contenders if c.name.startswith("TransformerEngine")]
    bench = Bench(world_group(), CPU, 1, check=True)
    found = bench.run(CASE, contenders)
    refused = bench.run(replace(CASE, num_heads=3, num_kv_heads=3, element_bytes=2, window=3, name="w"), contenders)
    if rank == 0:  # one rank without it is enough
        sys.modules[ENGINE] = None  # type: ignore[assignment]
    return absent, found, refused, peers(world_group(), "cpu").absent


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="the package itself is here")
def test_transformer_engine_gets_the_tokens_that_it_expects() -> None:
    for absent, found, refused, then in run_distributed(_engine, 2):
        assert "transformer-engine is not measured: ModuleNotFoundError: No module named 'transformer_engine'" in absent
        assert [m.name for m in found] == [f"TransformerEngine, {kind}" for kind in ("p2p", "all_gather", "a2a")]
        assert all(m.seconds and not m.reason for m in found), found
        assert refused[0].reason.startswith("baseline=te_p2p: expected one that supports model.window")
        assert refused[2].reason.startswith("parallelism.context_parallel_size=2: expected a divisor of the heads of")
        assert len(then) == len(absent) and then[-1].startswith("transformer-engine is not measured")
