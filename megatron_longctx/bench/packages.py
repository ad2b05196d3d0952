"""Other packages' context-parallel attention, where they can be imported: ring-flash-attn and TransformerEngine.

Each has a layout and an order of dimensions of its own: mostly `[b, s, heads, d]`, a view of ours for a batch of one.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import Layout, build_layout
from .attention import Call, Case, Contender

RING, ENGINE = "ring_flash_attn", "transformer_engine.pytorch"


def packages(group: dist.ProcessGroup) -> tuple[list[Contender], list[str]]:
    """What all ranks of `group` can import, and a line for each package that they cannot; all call this together."""
    os.environ.setdefault("NVTE_FLASH_ATTN", "0")  # TransformerEngine is to take cuDNN's kernels, as we do
    found, absent = [], []
    for name, module, contenders in (
        ("ring-flash-attn", RING, _ring_flash_attn),
        ("TransformerEngine", ENGINE, _transformer_engine),
    ):
        reasons: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reasons, why_not(module), group=group)
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            found += contenders(group)
        else:
            absent.append(f"{name} is not measured: {module} cannot be imported ({reason})")
    return found, absent


def why_not(module: str) -> str | None:
    """Why a module cannot be imported; None where it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # packages with compiled parts fail in many ways
        return f"{type(error).__name__}: {error}".split("\n", 1)[0]
    return None


def _ring_flash_attn(group: dist.ProcessGroup) -> list[Contender]:
    return [
        Contender("ring-flash-attn, zigzag", partial(_ring, group, "zigzag_ring_flash_attn_func", "zigzag")),
        Contender("ring-flash-attn, ring", partial(_ring, group, "ring_flash_attn_func", "contiguous")),
        Contender("ring-flash-attn, llama3", partial(_llama3, group)),
    ]


def _ring(group: dist.ProcessGroup, function: str, layout: str, case: Case) -> tuple[Call, Layout]:
    attend = _function(function)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(*map(_batch_first, (q, k, v)), causal=True, group=group)
        return out.transpose(0, 1)

    return call, _even(group, layout, case)


def _llama3(group: dist.ProcessGroup, case: Case) -> tuple[Call, Layout]:
    """Keys and values are gathered some heads at a time; `[tokens, heads, d]` of one sequence in contiguous parts."""
    attend, prepare = _function("llama3_flash_attn_varlen_func"), _function("llama3_flash_attn_prepare_cu_seqlens")
    layout = _even(group, "contiguous", case)
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    bounds = torch.tensor([0, case.length], dtype=torch.int32, device=device)
    starts_q, starts_k, longest_q, longest_k, needed = prepare(bounds, causal=True, rank=rank, world_size=n)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(
            *(x.squeeze(1) for x in (q, k, v)),
            starts_q,
            starts_k,
            longest_q,
            longest_k,
            heads_k_stride=math.gcd(case.num_kv_heads, 4),
            local_k_slice=needed,
            causal=True,
            group=group,
        )
        return out.unsqueeze(1)

    return call, layout


def _function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(importlib.import_module(RING), name, None)
    if found is None:
        raise ValueError(f"this release of ring-flash-attn has no {name}")
    return found


def _transformer_engine(group: dist.ProcessGroup) -> list[Contender]:
    return [
        Contender(f"TransformerEngine, {kind}", partial(_engine, group, kind)) for kind in ("p2p", "all_gather", "a2a")
    ]


def _engine(group: dist.ProcessGroup, kind: str, case: Case) -> tuple[Call, Layout]:
    """All kinds take head-tail halves, as Megatron shards sequences for them."""
    layout, n = _even(group, "zigzag", case), dist.get_world_size(group)
    if kind == "a2a" and (case.num_heads % n or case.num_kv_heads % n):
        raise ValueError(f"{case.num_heads}:{case.num_kv_heads} heads: expected multiples of {n} ranks")
    attention = importlib.import_module(ENGINE).DotProductAttention(
        case.num_heads,
        case.head_dim,
        num_gqa_groups=case.num_kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
    )
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    attention.set_context_parallel_group(group, dist.get_process_group_ranks(group), stream, kind)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(*map(_batch_first, (q, k, v)))  # [b, s, heads * d]
        return out.reshape(*out.shape[:2], *q.shape[2:]).transpose(0, 1)

    return call, layout


def _batch_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


def _even(group: dist.ProcessGroup, layout: str, case: Case) -> Layout:
    """Equal parts of the sequence, two a rank in zigzag: what these packages take."""
    n = dist.get_world_size(group)
    parts = 2 * n if layout == "zigzag" else n
    if case.length % parts:
        raise ValueError(f"{case.length} tokens: expected a multiple of {parts}")
    return build_layout(layout, n, case.length)
