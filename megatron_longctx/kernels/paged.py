"""Attention of few queries over a paged cache, and the merge of what several ranks have found: decode, short prompts.

A sequence's tokens lie in the pages that its row of a table names, in order; a page is `page_tokens` slots. Of these a
query sees the first, as many as it says, without those in front of its window: a causal mask.
Shapes are static and lengths are read on the device, so that calls can be captured in CUDA graphs and replayed with
other tables. Results are partial: over the keys in these pages alone, to be merged by their lse.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from megatron_longctx.kernels.fused import fused
from megatron_longctx.kernels.interface import sum_dtype
from megatron_longctx.kernels.quantize_kv import SCALE_BYTES, unpack_kv

_fused = partial(fused, __name__, "decoding")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the fused kernels take."""


@dataclass(frozen=True)
class Pages:
    """Where the keys of `B` queries lie.

    Attributes:
        table: `[B / together, P]` int32, numbers of pages; entries past a sequence's last page may be anything.
        counts: `[B]` int32 or int64, tokens that each query sees, at most `P * page_tokens`; 0 for one that is none.
        page_tokens: slots of a page.
        together: neighbouring queries that are of one sequence, a power of two; 1 for decode.
        skipped: `[B]`, of the counts' dtype: how many of the counted tokens, from the first on, lie in front of each
            query's window; at most its count. None for no window.
    """

    table: Tensor
    counts: Tensor
    page_tokens: int
    together: int = 1
    skipped: Tensor | None = None


_TILE = 64
"""Queries x heads of a KV head that a program of the fused kernel can take without running out of registers."""
_MOST_TOGETHER = 16


def most_together(num_heads: int, num_kv_heads: int) -> int:
    """Neighbouring queries of one sequence that are best attended together."""
    group = 1 << (num_heads // num_kv_heads - 1).bit_length()
    return min(_MOST_TOGETHER, max(1, _TILE // group))


class PackedPartials:
    """(out, lse) of `B` queries as one flat message, so that one exchange carries both.

    Attributes:
        flat: `[..., B * h * (d + 1)]` fp32 (fp64 for fp64 queries).
        out: a view `[..., B, h, d]`. lse: a view `[..., B, h]`.
    """

    def __init__(self, flat: Tensor, rows: int, heads: int, head_dim: int) -> None:
        size, lead = rows * heads * head_dim, flat.shape[:-1]
        self.flat = flat
        self.out = flat[..., :size].view(*lead, rows, heads, head_dim)
        self.lse = flat[..., size:].view(*lead, rows, heads)

    @staticmethod
    def like(q: Tensor, ranks: tuple[int, ...] = ()) -> PackedPartials:
        """Room for the results of queries `[B, h, d]`, of each rank."""
        rows, heads, head_dim = q.shape
        flat = q.new_empty(*ranks, rows * heads * (head_dim + 1), dtype=sum_dtype(q.dtype))
        return PackedPartials(flat, rows, heads, head_dim)


@torch.no_grad()
def attend_pages(q: Tensor, cache: Tensor, pages: Pages, scale: float) -> PackedPartials:
    """Every query over the keys that it sees of its own sequence.

    Keys are split among as many programs as the device has room for (Flash-Decoding), whatever the lengths: the split
    depends on the shapes alone.

    Args:
        q: `[B, h, d]`; heads and their elements side by side.
        cache: `[slots, 2, g, d]`, keys and values, q's dtype; or `[slots, 2, g, d + 4]` uint8, as `quantize_kv` packs
            them, which are attended as `unpack_kv` gives them. `g` divides `h`. Strides of its first three dimensions
            are free.
        pages: on q's device.
        scale: factor of the scores before the softmax.

    Returns:
        out and natural-log lse in fp32 (fp64 for fp64 q). A query that sees no tokens: out 0, lse -inf.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(q, cache, pages)
    found = PackedPartials.like(q)
    twin = _fused() if q.is_cuda and q.dtype in DTYPES else None
    if q.numel():
        (twin.attend_pages_triton if twin else attend_pages_torch)(q, cache, pages, scale, found)
    return found


@torch.no_grad()
def attend_shares(q: Tensor, cache: Tensor, pages: Pages, scale: float) -> PackedPartials:
    """`attend_pages` before shares of the keys are merged: `[splits, B, h, d]` and `[splits, B, h]`."""
    twin = _fused() if q.is_cuda and q.dtype in DTYPES and q.numel() else None
    if twin is None:
        found = attend_pages(q, cache, pages, scale)
        return PackedPartials(found.flat[None], *q.shape)
    _check(q, cache, pages)
    return twin.attend_shares_triton(q, cache, pages, scale)  # type: ignore[no-any-return]


@torch.no_grad()
def merge_ranks(found: PackedPartials, out: Tensor) -> Tensor:
    """Merge what ranks have found over disjoint keys, in their order: the same numbers wherever it is computed.

    Args:
        found: of shapes `[n, B, h, d]` and `[n, B, h]`.
        out: `[B, h, d]` contiguous, any float dtype: is written and returned. 0 where no rank has keys.
    """
    twin = _fused() if out.is_cuda and found.flat.dtype == torch.float32 else None
    if out.numel():
        (twin.merge_ranks_triton if twin else merge_ranks_torch)(found, out)
    return out


def attend_pages_torch(q: Tensor, cache: Tensor, pages: Pages, scale: float, found: PackedPartials) -> None:
    """`attend_pages` in plain PyTorch: the reference, and the way on CPU. Reads the lengths on the host."""
    heads, kv_heads = q.shape[1], cache.shape[2]
    counts = pages.counts.tolist()
    skipped = [0] * len(counts) if pages.skipped is None else pages.skipped.tolist()
    for row, (first, count) in enumerate(zip(skipped, counts, strict=True)):
        if first == count:
            found.out[row] = 0
            found.lse[row] = -torch.inf
            continue
        page = first // pages.page_tokens
        used = pages.table[row // pages.together, page : -(-count // pages.page_tokens)].tolist()
        before = page * pages.page_tokens
        tokens = _tokens(cache, used, pages.page_tokens)[first - before : count - before]
        if cache.dtype == torch.uint8:
            tokens = torch.cat(unpack_kv(tokens.unsqueeze(2), q.dtype), dim=1)
        k, v = tokens.to(found.flat.dtype).permute(1, 2, 0, 3)  # [g, t, d]
        queries = q[row].to(found.flat.dtype).view(kv_heads, heads // kv_heads, -1)
        scores = queries @ k.transpose(1, 2) * scale
        found.lse[row] = scores.logsumexp(-1).flatten()
        found.out[row] = (scores.softmax(-1) @ v).flatten(0, 1)


def _tokens(cache: Tensor, pages: list[int], page_tokens: int) -> Tensor:
    """`[t, 2, g, …]`: the slots of some pages; in place where the pages are neighbours, which they mostly are."""
    starts = [i for i, page in enumerate(pages) if not i or page != pages[i - 1] + 1]
    runs = [(pages[i], pages[j - 1] + 1) for i, j in pairwise([*starts, len(pages)])]
    spans = [cache[first * page_tokens : stop * page_tokens] for first, stop in runs]
    return spans[0] if len(spans) == 1 else torch.cat(spans)


def merge_ranks_torch(found: PackedPartials, out: Tensor) -> None:
    """`merge_ranks` in plain PyTorch."""
    most = found.lse.amax(0)
    base = torch.where(most == -torch.inf, 0.0, most)
    weights = (found.lse - base).exp()
    total = torch.zeros_like(found.out[0])
    for weight, part in zip(weights, found.out, strict=True):
        total += weight[..., None] * part
    sums = weights.sum(0)[..., None]
    out.copy_(total / torch.where(sums == 0, 1.0, sums))


def fused_kernels() -> bool:
    """Whether calls on GPUs run kernels of ours, which graphs can capture."""
    return _fused() is not None


def _check(q: Tensor, cache: Tensor, pages: Pages) -> None:
    rows = q.shape[0]
    packed = cache.dtype == torch.uint8
    fits = q.ndim == 3 and cache.ndim == 4 and cache.shape[1] == 2
    fits = fits and cache.shape[3] == q.shape[2] + SCALE_BYTES * packed
    if not fits or not cache.shape[2] or q.shape[1] % cache.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, cache {tuple(cache.shape)}: expected q [B, h, d] and a cache [slots, 2, g, d] ("
            f"d + {SCALE_BYTES} of 8-bit values), g a divisor of h."
        )
    together = pages.together
    if together < 1 or together & (together - 1) or rows % together:
        raise ValueError(f"together={together}: expected a power of two that divides the {rows} queries.")
    of_table, of_counts = tuple(pages.table.shape), tuple(pages.counts.shape)
    of_skipped = of_counts if pages.skipped is None else tuple(pages.skipped.shape)
    if len(of_table) != 2 or of_table[0] != rows // together or pages.page_tokens < 1:
        raise ValueError(
            f"table {of_table}, {pages.page_tokens} tokens a page: expected [{rows // together}, P] and 1 or more."
        )
    if not of_counts == of_skipped == (rows,):
        raise ValueError(f"counts {of_counts}, skipped {of_skipped}: expected [{rows}] each.")
    if not (packed or q.dtype == cache.dtype) or q.stride(-1) != 1 or cache.stride(-1) != 1:
        raise ValueError(
            f"q is {q.dtype} with strides {q.stride()}, the cache {cache.dtype} with {cache.stride()}: expected one "
            "dtype, and heads whose elements lie side by side."
        )
