"""Other packages in the attention bench: given their layouts, and named with a reason where they are not installed."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.bench.attention import Case
from megatron_longctx.bench.packages import ENGINE, packages
from megatron_longctx.bench.ring_package import RING
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, random_qkv, shard
from megatron_longctx.testing.tolerances import relative_error

CASE = Case(24, 4, 2, head_dim=8)


def _whole(x: Tensor, group: Any) -> Tensor:
    """`[b, s, heads, d]` of a rank to the whole sequence, as the package documents it: 2 n parts, of which rank r has
    r and 2 n - 1 - r."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    pairs = [part.chunk(2, dim=1) for part in parts]
    return torch.cat([front for front, _ in pairs] + [back for _, back in reversed(pairs)], dim=1)


def _attend(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
    """This rank's rows of causal attention over the whole sequence, in its own order."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    q, k, v = (_whole(x, group).transpose(0, 1) for x in (q, k, v))
    pieces = dense_attention(q, k, v, torch.zeros_like(q), True)["out"].transpose(0, 1).chunk(2 * n, dim=1)
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
        return _attend(q, k, v, self.group).flatten(2)


def _found(rank: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    absent = packages(group, "cpu").absent
    sys.modules["transformer_engine"] = ModuleType("transformer_engine")
    sys.modules[ENGINE] = SimpleNamespace(DotProductAttention=_DotProductAttention)  # type: ignore[assignment]
    here = packages(group, "cpu")
    whole = random_qkv(24, 1, 4, 2, 8, torch.bfloat16)
    truth = dense_attention(*whole, True)["out"]
    errors, refused = {}, []
    for contender in here.contenders[-3:]:
        call, layout = contender.make(CASE)
        out = call(*(shard(x, layout, rank) for x in whole[:3]))
        errors[contender.name] = relative_error(out, shard(truth, layout, rank))
        cases = [replace(CASE, length=25), replace(CASE, element_bytes=4)]
        cases += [replace(CASE, num_heads=3, num_kv_heads=3)] * contender.name.endswith("a2a")
        for case in cases:
            with pytest.raises(ValueError) as error:
                contender.make(case)
            refused.append(str(error.value))
    if rank == 0:  # one rank without it is enough
        sys.modules[ENGINE] = None  # type: ignore[assignment]
    then = packages(group, "cpu")
    return {"absent": absent, "notes": here.notes, "errors": errors, "refused": refused, "then": then.absent}


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="the package itself is here")
def test_transformer_engine_gets_the_tokens_that_it_expects() -> None:
    without_ring = importlib.util.find_spec(RING) is None
    names = ["ring-flash-attn"] * without_ring + ["TransformerEngine"]
    for found in run_distributed(_found, 2):
        assert [line.split(" is not measured: it cannot be imported ")[0] for line in found["absent"]] == names
        assert "(ModuleNotFoundError: No module named 'transformer_engine')" in found["absent"][-1]
        assert set(found["errors"]) == {f"TransformerEngine, {kind}" for kind in ("p2p", "all_gather", "a2a")}
        assert max(found["errors"].values()) < 1e-6
        assert found["notes"][-1].startswith("TransformerEngine: It calls cuDNN")
        said = ["25 tokens: expected a multiple of 4", "fp32: expected bf16"]
        assert found["refused"] == [*said, *said, *said, "3:3 heads: expected multiples of 2 ranks"]
        assert len(found["then"]) == len(names) and found["then"][-1].startswith("TransformerEngine is not measured")
