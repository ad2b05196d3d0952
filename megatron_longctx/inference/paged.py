"""Attention of few queries over a paged cache, and the merge of partial results over ranks: decode and short prompts.

The tokens of a sequence are stored in order in the pages that its row of a table names; a page has `page_tokens` slots.
A query sees the first `count` of these tokens, without those in front of its window: a causal mask. Shapes are static
and lengths are read on the device, so that CUDA graphs can capture calls and replay them with other tables. Results are
partial: over the keys in these pages alone, to be merged by their lse.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..core.kernels.fused import load_fused
from ..core.kernels.interface import sum_dtype
from ..core.kernels.no_grad import no_grad
from .quantize_kv import SCALE_BYTES, unpack_kv

_fused = partial(load_fused, __name__, "decoding")

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of queries that the fused kernels support."""

_TILE = 64
"""Queries times heads of a KV head that one program of the fused kernel can handle without running out of registers."""
_MAX_QUERIES = 16


@dataclass(frozen=True)
class Pages:
    """The pages that hold the keys of `B` queries.

    Attributes:
        table: `[B / queries_per_tile, P]` int32, page numbers; entries after a sequence's last page are not read.
        counts: `[B]` int32 or int64, the number of tokens that each query sees, at most `P * page_tokens`; 0 for a
            padding row.
        page_tokens: slots of a page.
        queries_per_tile: the number of neighbouring queries that belong to one sequence, a power of two; 1 for decode.
        window_starts: `[B]`, dtype of counts: the first token in each query's window, at most its count. None for no
            window.
    """

    table: Tensor
    counts: Tensor
    page_tokens: int
    queries_per_tile: int = 1
    window_starts: Tensor | None = None


def max_queries_per_tile(num_heads: int, num_kv_heads: int) -> int:
    """Return the fastest number of neighbouring queries of one sequence for one program."""
    group = 1 << (num_heads // num_kv_heads - 1).bit_length()
    return min(_MAX_QUERIES, max(1, _TILE // group))


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

    def divided(self, parts: int) -> PackedPartials:
        """Return a copy whose first dimension is the part of the heads: `[parts, B * h / parts * (d + 1)]`."""
        rows, heads, head_dim = self.out.shape
        copy = PackedPartials(self.flat.new_empty(parts, self.flat.numel() // parts), rows, heads // parts, head_dim)
        copy.out.copy_(self.out.view(rows, parts, -1, head_dim).transpose(0, 1))
        copy.lse.copy_(self.lse.view(rows, parts, -1).transpose(0, 1))
        return copy

    @staticmethod
    def empty(q: Tensor, copies: tuple[int, ...] = ()) -> PackedPartials:
        """Allocate uninitialized results of queries `[B, h, d]`, with the leading dimensions `copies`."""
        rows, heads, head_dim = q.shape
        flat = q.new_empty(*copies, rows * heads * (head_dim + 1), dtype=sum_dtype(q.dtype))
        return PackedPartials(flat, rows, heads, head_dim)


@no_grad
def attend_pages(q: Tensor, cache: Tensor, pages: Pages, scale: float) -> PackedPartials:
    """Attend with every query over the keys of its sequence that it sees.

    Keys are split among as many programs as the device has room for (Flash-Decoding). The split depends on shapes
    alone, not on lengths.

    Args:
        q: `[B, h, d]`; heads and their elements adjacent.
        cache: `[slots, 2, g, d]`, keys and values, q's dtype; or `[slots, 2, g, d + 4]` uint8 as packed by
            `quantize_kv`, attended as `unpack_kv` returns them. `g` divides `h`. Its first three dimensions may have
            any strides.
        pages: on q's device.
        scale: factor of the scores before the softmax.

    Returns:
        out and natural-log lse in fp32 (fp64 for fp64 q). A query that sees no tokens gets out 0 and lse -inf.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    splits = attend_splits(q, cache, pages, scale)
    if len(splits.flat) == 1:
        return PackedPartials(splits.flat[0], *q.shape)
    merged = PackedPartials.empty(q)
    merge_ranks(splits, merged.out, merged.lse)
    return merged


@no_grad
def attend_splits(q: Tensor, cache: Tensor, pages: Pages, scale: float) -> PackedPartials:
    """Run `attend_pages` without merging the splits of the keys: `[splits, B, h, d]` and `[splits, B, h]`."""
    _check(q, cache, pages)
    impl = _fused() if q.is_cuda and q.dtype in FUSED_DTYPES and q.numel() else None
    splits: PackedPartials = (impl.attend_triton if impl else attend_torch)(q, cache, pages, scale)
    return splits


@no_grad
def merge_ranks(partials: PackedPartials, out: Tensor, lse: Tensor | None = None) -> Tensor:
    """Merge results over disjoint keys, of ranks or splits, in their order: bit-identical wherever it is computed.

    Args:
        partials: of shapes `[n, B, h, d]` and `[n, B, h]`.
        out: `[B, h, d]` contiguous, any float dtype: is written and returned. 0 where there are no keys.
        lse: `[B, h]` contiguous, is written too; None to leave it out.
    """
    impl = _fused() if out.is_cuda and partials.flat.dtype == torch.float32 else None
    if out.numel():
        (impl.merge_ranks_triton if impl else merge_ranks_torch)(partials, out, lse)
    return out


def attend_torch(q: Tensor, cache: Tensor, pages: Pages, scale: float) -> PackedPartials:
    """Run `attend_splits` in plain PyTorch, in one split: the reference, and the way on CPU."""
    splits = PackedPartials.empty(q, (1,))
    out, lse = splits.out[0], splits.lse[0]
    heads, kv_heads = q.shape[1], cache.shape[2]
    counts = pages.counts.tolist()
    window_starts = [0] * len(counts) if pages.window_starts is None else pages.window_starts.tolist()
    for row, (first, count) in enumerate(zip(window_starts, counts, strict=True)):
        if first == count:
            out[row] = 0
            lse[row] = -torch.inf
            continue
        page = first // pages.page_tokens
        used = pages.table[row // pages.queries_per_tile, page : -(-count // pages.page_tokens)].tolist()
        before = page * pages.page_tokens
        tokens = _tokens(cache, used, pages.page_tokens)[first - before : count - before]
        if cache.dtype == torch.uint8:
            tokens = torch.cat(unpack_kv(tokens.unsqueeze(2), q.dtype), dim=1)
        k, v = tokens.to(out.dtype).permute(1, 2, 0, 3)  # [g, t, d]
        queries = q[row].to(out.dtype).view(kv_heads, heads // kv_heads, -1)
        scores = queries @ k.transpose(1, 2) * scale
        lse[row] = scores.logsumexp(-1).flatten()
        out[row] = (scores.softmax(-1) @ v).flatten(0, 1)
    return splits


def _tokens(cache: Tensor, pages: list[int], page_tokens: int) -> Tensor:
    """Return the slots of pages, `[t, 2, g, …]`: a view if the pages are neighbours, which they mostly are."""
    starts = [i for i, page in enumerate(pages) if not i or page != pages[i - 1] + 1]
    runs = [(pages[i], pages[j - 1] + 1) for i, j in pairwise([*starts, len(pages)])]
    spans = [cache[first * page_tokens : stop * page_tokens] for first, stop in runs]
    return spans[0] if len(spans) == 1 else torch.cat(spans)


def merge_ranks_torch(partials: PackedPartials, out: Tensor, lse: Tensor | None = None) -> None:
    """Run `merge_ranks` in plain PyTorch."""
    most = partials.lse.amax(0)
    base = torch.where(most == -torch.inf, 0.0, most)
    weights = (partials.lse - base).exp()
    total = torch.zeros_like(partials.out[0])
    for weight, part in zip(weights, partials.out, strict=True):
        total += weight[..., None] * part
    sums = weights.sum(0)
    out.copy_(total / torch.where(sums == 0, 1.0, sums)[..., None])
    if lse is not None:
        lse.copy_(base + sums.log())


def has_fused_kernels() -> bool:
    """Whether calls on GPUs run our kernels, which graphs can capture."""
    return _fused() is not None


def compile_decode(q: Tensor, cache: Tensor, page_tokens: int, windows: Collection[bool] = (False,)) -> None:
    """Compile the kernels of decode: for 1 to 16 sequences, and for prompts with several queries per tile.

    The distance between results is a multiple of 16 numbers or not, which makes two variants of each kernel.

    Args:
        q: `[0, h, d]`. Nothing is compiled for a dtype that the fused kernels do not support.
        cache: as for `attend_pages` with such queries; not read.
        windows: whether layers have a window; both if some do and some do not.
    """
    if q.dtype not in FUSED_DTYPES:
        return
    per_tile = max_queries_per_tile(q.shape[1], cache.shape[2])
    for rows, in_tile in [(2**i, 1) for i in range(5)] + [(per_tile << i, per_tile) for i in range(6)]:
        queries = q.new_zeros(rows, *q.shape[1:])
        table = torch.zeros(rows // in_tile, 1, dtype=torch.int32, device=cache.device)
        counts = torch.zeros(rows, dtype=torch.int64, device=cache.device)
        for window in windows:
            pages = Pages(table, counts, page_tokens, in_tile, counts if window else None)
            flat = attend_pages(queries, cache, pages, 1.0).flat
        merge_ranks(PackedPartials(torch.stack((flat, flat)), *queries.shape), torch.empty_like(queries))


def _check(q: Tensor, cache: Tensor, pages: Pages) -> None:
    rows = q.shape[0]
    packed = cache.dtype == torch.uint8
    fits = q.ndim == 3 and cache.ndim == 4 and cache.shape[1] == 2
    fits = fits and cache.shape[3] == q.shape[2] + SCALE_BYTES * packed
    if not fits or not cache.shape[2] or q.shape[1] % cache.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, cache {tuple(cache.shape)}: expected q [B, h, d] and a cache [slots, 2, g, d] ("
            f"d + {SCALE_BYTES} for 8-bit values), where g divides h."
        )
    per_tile = pages.queries_per_tile
    if per_tile < 1 or per_tile & (per_tile - 1) or rows % per_tile:
        raise ValueError(f"queries_per_tile={per_tile}: expected a power of two that divides the {rows} queries.")
    of_table, of_counts = tuple(pages.table.shape), tuple(pages.counts.shape)
    of_starts = of_counts if pages.window_starts is None else tuple(pages.window_starts.shape)
    if len(of_table) != 2 or of_table[0] != rows // per_tile or pages.page_tokens < 1:
        raise ValueError(
            f"table {of_table}, {pages.page_tokens} tokens a page: expected [{rows // per_tile}, P] and 1 or more."
        )
    if not of_counts == of_starts == (rows,):
        raise ValueError(f"counts {of_counts}, window_starts {of_starts}: expected [{rows}] each.")
    if not (packed or q.dtype == cache.dtype) or q.stride(-1) != 1 or cache.stride(-1) != 1:
        raise ValueError(
            f"q is {q.dtype} with strides {q.stride()}, the cache {cache.dtype} with {cache.stride()}: expected one "
            "dtype, and adjacent elements of each head."
        )
