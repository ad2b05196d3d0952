"""Query heads that share a KV head, seen as more queries of one head: for blocks of few queries.

Kernels give a tile of queries of one head to a processor, however few of its rows are there. Where nothing is masked,
queries do not depend on their order, so that the heads of a group fill one tile together. Rows are made and unmade by
three more launches a call (queries, output, lse), which short prompts pay with time to first token: there the device
waits for the host.
"""

from __future__ import annotations

from torch import Tensor

_TILE = 64
"""Queries of a head that FlashAttention-2 computes together where it splits keys among processors."""


_LEAST_SAVED = 5e10
"""Operations in tiles that are spared, from which on rows are worth their launches: what FlashAttention-2 computes in
0.15 ms on an H200 (330 TFLOP/s). Derived from 66 new after 131,006 cached tokens (4 H200s, 32 query and 8 KV heads of
128, 32 layers): calls of 16 queries over 32,752 keys spared 2.6e10 each, and the first token took 99, 132 and 122 ms
with `pass_kv`, `pass_q` and `one_hop` (2 runs), without rows 105, 111 and 95 (5 runs). What larger calls gain is not
measured."""


def worth_rows(queries: int, keys: int, heads: tuple[int, int], head_dim: int) -> bool:
    """Whether the tiles that are spared when the `heads[0] / heads[1]` heads of a KV head are rows take longer than
    making rows of them does."""
    num_heads, kv_heads = heads
    apart = num_heads * -(-queries // _TILE)
    together = kv_heads * -(-queries * (num_heads // kv_heads) // _TILE)
    return 4.0 * (apart - together) * _TILE * keys * head_dim >= _LEAST_SAVED


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
