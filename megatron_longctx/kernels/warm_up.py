"""Kernels of ours compiled before somebody waits for them: Triton compiles each variant when it is first launched."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

import torch
from torch import Tensor

from megatron_longctx.kernels.paged import DTYPES, PackedPartials, Pages, attend_pages, merge_ranks, most_together
from megatron_longctx.kernels.partials import Partial, merge_partials
from megatron_longctx.schedules.accumulators import MOST_PARTIALS


def compile_merges(num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Merge every number of partial outputs once, in every precision that inference merges them in.

    Partials are kernels' results in `dtype`; the first may be what was merged before, in fp32. They become a result in
    `dtype`, or are merged further, in fp32. How many come together depends on how a prompt's tokens fall on the ranks,
    so that without this the first prompts of some lengths would wait for a compiler, each for other variants.
    """
    precisions = dict.fromkeys((dtype, torch.float32))
    for into, first, count in product(precisions, precisions, range(1, MOST_PARTIALS + 1)):
        values = [torch.zeros(2, 1, num_heads, head_dim, dtype=kind, device=device) for kind in (first, dtype, into)]
        lse = torch.zeros(2, 1, num_heads, dtype=torch.float32, device=device)
        parts = [Partial(0, 0, values[min(i, 1)], lse) for i in range(count)]
        merge_partials(parts, values[2], torch.empty_like(lse))


def compile_decode(q: Tensor, cache: Tensor, page_tokens: int, windows: Collection[bool] = (False,)) -> None:
    """Attend over pages, and merge what ranks have found, for 1 to 16 sequences, and for prompts of several queries
    together: results lie multiples of 16 numbers apart or not, which makes two variants of each kernel.

    Args:
        q: `[0, h, d]`. In a dtype that no fused kernel takes, nothing is compiled.
        cache: as `paged.attend_pages` takes it with such queries; not read.
        windows: whether some layers have no window, and some have one.
    """
    if q.dtype not in DTYPES:
        return
    together = most_together(q.shape[1], cache.shape[2])
    for rows, beside in [(2**i, 1) for i in range(5)] + [(together << i, together) for i in range(6)]:
        queries = q.new_zeros(rows, *q.shape[1:])
        table = torch.zeros(rows // beside, 1, dtype=torch.int32, device=cache.device)
        counts = torch.zeros(rows, dtype=torch.int64, device=cache.device)
        for window in windows:
            pages = Pages(table, counts, page_tokens, beside, counts if window else None)
            found = attend_pages(queries, cache, pages, 1.0).flat
        merge_ranks(PackedPartials(torch.stack((found, found)), *queries.shape), torch.empty_like(queries))
