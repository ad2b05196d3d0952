"""Other packages in the attention bench: given their layouts, and named with a reason where they are not installed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.bench.attention import Case
from megatron_longctx.bench.packages import ENGINE, RING, packages, why_not
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, random_qkv, shard
from megatron_longctx.testing.tolerances import relative_error

CASE = Case(24, 4, 2, head_dim=8, element_bytes=4)


def _whole(x: Tensor, group: Any, halves: bool) -> Tensor:
    """`[b, s, heads, d]` of a rank to the whole sequence, in the order that the packages document: parts one after the
    other, or 2 n of which rank r has r and 2 n - 1 - r."""
    n = dist.get_world_size(group)
    parts = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(parts, x.contiguous(), group=group)
    if halves:
        pairs = [part.chunk(2, dim=1) for part in parts]
        parts = [front for front, _ in pairs] + [back for _, back in reversed(pairs)]
    return torch.cat(parts, dim=1)


def _attend(q: Tensor, k: Tensor, v: Tensor, group: Any, halves: bool) -> Tensor:
    """This rank's rows of causal attention over the whole sequence, in its own order."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    q, k, v = (_whole(x, group, halves).transpose(0, 1) for x in (q, k, v))
    out = dense_attention(q, k, v, torch.zeros_like(q), True)["out"].transpose(0, 1)
    if not halves:
        return out.chunk(n, dim=1)[rank]
    pieces = out.chunk(2 * n, dim=1)
    return torch.cat([pieces[rank], pieces[2 * n - 1 - rank]], dim=1)


class _DotProductAttention:
    """By the documented interface of TransformerEngine's class of this name."""

    def __init__(self, num_attention_heads: int, kv_channels: int, **options: Any) -> None:
        assert (num_attention_heads, kv_channels, options["num_gqa_groups"]) == (4, 8, 2)
        assert options["qkv_format"] == "bshd" and options["attn_mask_type"] == "causal"
        assert options["attention_dropout"] == 0.0

    def set_context_parallel_group(self, group: Any, ranks: list[int], stream: Any, kind: str) -> None:
        assert ranks == [0, 1] and kind in ("p2p", "all_gather", "a2a")
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(q, k, v, self.group, True).flatten(2)


def _prepare(bounds: Tensor, causal: bool, rank: int, world_size: int) -> tuple[Any, ...]:
    assert bounds.tolist() == [0, 24] and bounds.dtype == torch.int32 and causal and world_size == 2
    return "starts q", "starts k", "longest q", "longest k", "needed"


def _llama3(q: Tensor, k: Tensor, v: Tensor, *rest: Any, heads_k_stride: int, **named: Any) -> Tensor:
    assert rest == ("starts q", "starts k", "longest q", "longest k") and named["local_k_slice"] == "needed"
    assert k.shape[1] % heads_k_stride == 0 and named["causal"]
    return _attend(*(x.unsqueeze(0) for x in (q, k, v)), named["group"], False).squeeze(0)


def _stand_ins() -> None:
    ring: Any = ModuleType(RING)
    ring.zigzag_ring_flash_attn_func = lambda q, k, v, causal, group: _attend(q, k, v, group, causal)
    ring.ring_flash_attn_func = lambda q, k, v, causal, group: _attend(q, k, v, group, not causal)
    ring.llama3_flash_attn_varlen_func, ring.llama3_flash_attn_prepare_cu_seqlens = _llama3, _prepare
    sys.modules[RING] = ring
    sys.modules["transformer_engine"] = ModuleType("transformer_engine")
    sys.modules[ENGINE] = SimpleNamespace(DotProductAttention=_DotProductAttention)  # type: ignore[assignment]


def _found(rank: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    without, absent = packages(group)
    assert without == []
    _stand_ins()
    contenders, none = packages(group)
    assert none == []
    whole = random_qkv(24, 1, 4, 2, 8, torch.float32)
    truth = dense_attention(*whole, True)["out"]
    errors, refused = {}, {}
    for contender in contenders:
        call, layout = contender.make(CASE)
        out = call(*(shard(x, layout, rank) for x in whole[:3]))
        errors[contender.name] = relative_error(out, shard(truth, layout, rank))
        try:
            contender.make(Case(25, 3, 3))
        except ValueError as error:
            refused[contender.name] = str(error)
    if rank == 0:  # one rank without it is enough
        del sys.modules[RING]
    return {"absent": absent, "errors": errors, "refused": refused, "then": packages(group)[1]}


def test_every_package_gets_the_tokens_that_it_expects() -> None:
    if why_not(RING) is None or why_not(ENGINE) is None:
        pytest.skip("the packages themselves are here")
    for found in run_distributed(_found, 2):
        assert [line.split(" is not measured: ")[0] for line in found["absent"]] == [
            "ring-flash-attn",
            "TransformerEngine",
        ]
        assert f"{RING} cannot be imported (ModuleNotFoundError: No module named '{RING}')" in found["absent"][0]
        assert len(found["errors"]) == 6 and max(found["errors"].values()) < 1e-6
        assert set(found["refused"]) == set(found["errors"])
        assert found["refused"]["TransformerEngine, p2p"] == "25 tokens: expected a multiple of 4"
        assert len(found["then"]) == 1 and "ring-flash-attn is not measured" in found["then"][0]
