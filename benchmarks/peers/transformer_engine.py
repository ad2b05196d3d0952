"""TransformerEngine's context parallelism, on cuDNN's kernels through its own build."""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..cases import Case
from ..measure import Contender, Made
from .parts import check_parts, head_tail

ENGINE = "transformer_engine.pytorch"
NOTE = "it calls cuDNN by itself (NVTE_FLASH_ATTN=0 unless set otherwise), through its own build."


def contenders(group: dist.ProcessGroup, kernel: str) -> list[Contender]:
    """Raises ImportError where it is not installed."""
    os.environ.setdefault("NVTE_FLASH_ATTN", "0")
    importlib.import_module(ENGINE)
    kinds = ("p2p", "all_gather", "a2a")
    return [Contender(f"TransformerEngine, {kind}", partial(_engine, group, kind)) for kind in kinds]


def _engine(group: dist.ProcessGroup, kind: str, case: Case) -> Made:
    """All kinds take head-tail halves of every document, as Megatron shards sequences for them."""
    n, packed = dist.get_world_size(group), len(case.documents) > 1
    check_parts(case, 2 * n)
    if kind == "a2a" and (case.num_heads % n or case.num_kv_heads % n):
        raise ValueError(f"{case.heads} heads: expected multiples of {n} ranks")
    if kind == "p2p" and case.window:
        raise ValueError(f"mask {case.name}: expected one without a window")
    masks = {
        (False, True): "causal",
        (False, False): "no_mask",
        (True, True): "padding_causal",
        (True, False): "padding",
    }
    window: dict[str, Any] = {}
    if case.window:
        window = {"window_size": (case.window, 0 if case.causal else case.window)}
    attention = importlib.import_module(ENGINE).DotProductAttention(
        case.num_heads,
        case.head_dim,
        num_gqa_groups=case.num_kv_heads,
        attention_dropout=0.0,
        qkv_format="thd" if packed else "bshd",
        attn_mask_type=masks[packed, case.causal],
        **window,
    )
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    attention.set_context_parallel_group(group, dist.get_process_group_ranks(group), stream, kind)
    lengths = _lengths(case) if packed else {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor
        if packed:
            out = attention(q[:, 0], k[:, 0], v[:, 0], **lengths)  # [s, heads * d]
            return out.view(q.shape)
        out = attention(*(x.transpose(0, 1).contiguous() for x in (q, k, v)))  # [b, s, heads * d]
        return out.view(*out.shape[:2], *q.shape[2:]).transpose(0, 1)

    return Made(call, head_tail(case, n, dist.get_rank(group)))


def _lengths(case: Case) -> dict[str, Any]:
    """Of the documents on all ranks together; none is padded."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    starts = torch.tensor([0, *case.documents], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    longest = -(-max(case.documents) // 64) * 64
    named = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return {**dict.fromkeys(named, starts), "max_seqlen_q": longest, "max_seqlen_kv": longest}
