"""Query heads that share a KV head, seen as more queries of one head: for blocks of few queries.

Kernels give a tile of queries of one head to a processor, however few of its rows are there. Where nothing is masked,
queries do not depend on their order, so that the heads of a group fill one tile together.
"""

from __future__ import annotations

from torch import Tensor

_TILE = 64
"""Queries of a head that FlashAttention-2 computes together where it splits keys among processors."""


def fewer_tiles(queries: int, group: int) -> bool:
    """Whether so many queries of `group` heads to a KV head take fewer tiles together."""
    return -(-queries * group // _TILE) < group * -(-queries // _TILE)


def as_rows(q: Tensor, num_kv_heads: int) -> Tensor:
    """`[s, b, h, d]` as `[s * r, b, g, d]`: the r = h / g heads of a KV head next to each other. A copy."""
    s, batch, heads, head_dim = q.shape
    group = heads // num_kv_heads
    grouped = q.reshape(s, batch, num_kv_heads, group, head_dim).permute(0, 3, 1, 2, 4)
    return grouped.reshape(s * group, batch, num_kv_heads, head_dim)


def as_heads(rows: Tensor, queries: int) -> Tensor:
    """The way back, of an output `[s * r, b, g, d]` or an lse `[s * r, b, g]`: `[s, b, h, ...]`. A copy."""
    count, batch, kv_heads, *rest = rows.shape
    group = count // queries
    grouped = rows.reshape(queries, group, batch, kv_heads, *rest).movedim(1, 3)
    return grouped.reshape(queries, batch, kv_heads * group, *rest)
