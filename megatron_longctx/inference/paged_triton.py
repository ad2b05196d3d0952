"""The functions of `paged` as fused kernels, without checks of arguments.

A program handles one split of one sequence's keys, for the query heads of one KV head and all queries of a tile, so
that it reads keys and values once for all of them. A second kernel merges the splits of a sequence, in order. KV heads
are the grid's fastest dimension: the heads of a token are neighbours in memory, and so programs that run at the same
time read neighbours.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.kernels.fused import row_strides
from .paged import PackedPartials, Pages

_MIN_ROWS = 16
"""The smallest size of a matrix product on tensor cores; missing rows and columns are padded."""
_KEY_BYTES = 16384
"""The bytes of keys, and the bytes of values, that a program reads at a time."""
_STAGES = 5
"""The number of pipeline stages. The page number is loaded first, then keys and values: with 5 stages two blocks are in
flight while one is used."""
_PER_PROCESSOR = 2
"""The number of programs with several queries that a multiprocessor of an H100 or H200 runs at a time: each takes 113
KiB of shared memory. It is also the minimum for single queries, which take 70 KiB and wait for memory."""
_MAX_SPLITS = 128
_MERGED = 16
"""The number of partials that the merging kernel takes at a time."""


# Arguments without specialized variants: they change with length and batch: numbers that need not be multiples of
# 16 for vector loads, and addresses of values that are read one at a time.
@triton.jit(
    do_not_specialize=["splits", "table_stride", "lse_split", "lse_row"],
    do_not_specialize_on_alignment=["table", "counts", "window_starts", "lse"],
)  # type: ignore[untyped-decorator]
def _attend_kernel(  # type: ignore[no-untyped-def]
    q, cache, table, counts, window_starts, out, lse, scale, splits, group, head_dim,
    q_row, q_head, slot_stride, value_stride, kv_head_stride, table_stride,
    out_split, out_row, lse_split, lse_row,
    PAGE: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr, KEYS: tl.constexpr,
    INT8: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    place = tl.arange(0, QUERIES * HEADS)
    row = tl.program_id(2) * QUERIES + place // HEADS
    head = place % HEADS
    lowest = 0
    if QUERIES > 1 or WINDOW:
        count = tl.load(counts + row).to(tl.int32)
        longest = tl.max(count, 0)
        if WINDOW:
            skip = tl.load(window_starts + row).to(tl.int32)
            lowest = tl.min(tl.where(skip < count, skip, longest), 0) // KEYS * KEYS
    else:
        longest = tl.load(counts + tl.program_id(2)).to(tl.int32)
    # Splits are whole blocks, so that no block crosses the end of a page if pages are whole blocks.
    share = tl.cdiv(tl.cdiv(longest - lowest, splits), KEYS) * KEYS
    first = lowest + split * share
    stop = tl.minimum(first + share, longest)
    col = tl.arange(0, COLS)
    key = tl.arange(0, KEYS)
    real = head < group
    heads = kv_head * group + head
    at_q = q + (row.to(tl.int64) * q_row + heads * q_head)[:, None] + col[None, :]
    queries = tl.load(at_q, mask=real[:, None] & (col < head_dim)[None, :], other=0.0)
    factor = scale * 1.4426950408889634  # log2(e): the hardware computes powers of 2
    most = tl.full((QUERIES * HEADS,), -float("inf"), dtype=tl.float32)
    weights = tl.zeros((QUERIES * HEADS,), dtype=tl.float32)
    total = tl.zeros((QUERIES * HEADS, COLS), dtype=tl.float32)
    pages = table + tl.program_id(2).to(tl.int64) * table_stride
    base = cache + kv_head.to(tl.int64) * kv_head_stride
    for start in range(first, stop, KEYS):
        token = start + key
        inside = token < stop
        if PAGE % KEYS == 0:
            page = tl.load(pages + start // PAGE).to(tl.int64)
            slot = page * PAGE + start % PAGE + key
        else:
            page = tl.load(pages + token // PAGE, mask=inside, other=0).to(tl.int64)
            slot = page * PAGE + token % PAGE
        # 64-bit: a million slots of many heads exceed 2**31 elements.
        at = base + (slot * slot_stride)[:, None] + col[None, :]
        there = inside[:, None] & (col < head_dim)[None, :]
        keys = tl.load(at, mask=there, other=0.0)
        values = tl.load(at + value_stride, mask=there, other=0.0)
        if INT8:  # each head's elements are followed by their scale
            scales = (base + slot * slot_stride + head_dim).to(tl.pointer_type(tl.float32), bitcast=True)
            of_keys = tl.load(scales, mask=inside, other=0.0)
            of_values = tl.load(scales + value_stride // 4, mask=inside, other=0.0)
            keys = (keys.to(tl.float32) * of_keys[:, None]).to(queries.dtype)
            values = (values.to(tl.float32) * of_values[:, None]).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor
        if QUERIES > 1 or WINDOW:  # a query may see fewer keys than its neighbours, and none of some blocks
            seen = inside[None, :] & (token[None, :] < count[:, None])
            if WINDOW:
                seen = seen & (token[None, :] >= skip[:, None])
            scores = tl.where(seen, scores, -float("inf"))
            larger = tl.maximum(most, tl.max(scores, 1))
            origin = tl.where(larger == -float("inf"), 0.0, larger)
        else:  # every block has a key inside, so the maximum is a number
            scores = tl.where(inside[None, :], scores, -float("inf"))
            larger = tl.maximum(most, tl.max(scores, 1))
            origin = larger
        shrink = tl.exp2(most - origin)
        weight = tl.exp2(scores - origin[:, None])
        weights = weights * shrink + tl.sum(weight, 1)
        total = total * shrink[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        most = larger
    empty = weights == 0.0  # for NaN inputs it is NaN, so it is 0 only without keys
    divisor = tl.where(empty, 1.0, weights)
    found = tl.where(empty, -float("inf"), (tl.where(empty, 0.0, most) + tl.log2(divisor)) * 0.6931471805599453)
    at_out = (split.to(tl.int64) * out_split + row.to(tl.int64) * out_row + heads * head_dim)[:, None] + col[None, :]
    tl.store(out + at_out, total / divisor[:, None], mask=real[:, None] & (col < head_dim)[None, :])
    tl.store(lse + split.to(tl.int64) * lse_split + row.to(tl.int64) * lse_row + heads, found, mask=real)


@triton.jit(do_not_specialize=["count", "part_lse_stride"], do_not_specialize_on_alignment=["part_lse", "lse"])  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    parts, part_lse, out, lse, count, head_dim, part_stride, part_lse_stride,
    COLS: tl.constexpr, BLOCK: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # one head of one sequence
    col = tl.arange(0, COLS)
    part = tl.arange(0, BLOCK)
    most = -float("inf")
    for start in range(0, count, BLOCK):
        number = start + part
        at = part_lse + number.to(tl.int64) * part_lse_stride + row
        most = tl.maximum(most, tl.max(tl.load(at, mask=number < count, other=-float("inf")), 0))
    base = tl.where(most == -float("inf"), 0.0, most)  # without keys, -inf minus -inf would be NaN
    total = tl.zeros((COLS,), dtype=tl.float32)
    weights = 0.0
    for start in range(0, count, BLOCK):
        number = (start + part).to(tl.int64)
        there = number < count
        found = tl.load(part_lse + number * part_lse_stride + row, mask=there, other=-float("inf"))
        weight = tl.exp(found - base)
        at = parts + (number * part_stride + row * head_dim)[:, None] + col[None, :]
        values = tl.load(at, mask=there[:, None] & (col < head_dim)[None, :], other=0.0)
        total += tl.sum(weight[:, None] * values, 0)
        weights += tl.sum(weight, 0)
    # For NaN inputs the sum is NaN: it is 0 only without keys.
    divisor = tl.where(weights == 0, 1.0, weights)
    tl.store(out + row * head_dim + col, (total / divisor).to(out.dtype.element_ty), mask=col < head_dim)
    if WITH_LSE:
        tl.store(lse + row, tl.where(weights == 0, -float("inf"), base + tl.log(divisor)))


def attend_triton(q: Tensor, cache: Tensor, pages: Pages, scale: float) -> PackedPartials:
    """Run `paged.attend_splits`. q's heads may have any strides."""
    rows, heads, head_dim = q.shape
    kv_heads = cache.shape[2]
    per_tile, group = pages.queries_per_tile, heads // kv_heads
    splits = (num_splits if per_tile == 1 else even_splits)(rows // per_tile * kv_heads, q.device)
    parts = PackedPartials.empty(q, (splits,))
    cols = max(_MIN_ROWS, triton.next_power_of_2(head_dim))
    constants = {
        "PAGE": pages.page_tokens,
        "QUERIES": per_tile,
        "HEADS": max(-(-_MIN_ROWS // per_tile), triton.next_power_of_2(group)),
        "COLS": cols,
        "KEYS": max(_MIN_ROWS, min(64, _KEY_BYTES // (cols * q.element_size()))),
        "INT8": cache.dtype == torch.uint8,
        "WINDOW": pages.window_starts is not None,
    }
    window_starts = pages.counts if pages.window_starts is None else pages.window_starts
    cache = cache.view(torch.int8) if constants["INT8"] else cache
    # Triton launches on the current device, which may not be the tensors'. A CPU tensor's index, -1, has no effect.
    with torch.cuda.device(q.get_device()):
        _attend_kernel[(kv_heads, splits, rows // per_tile)](
            q, cache, pages.table, pages.counts, window_starts, parts.out, parts.lse, scale, splits, group, head_dim,
            *row_strides(q), *row_strides(cache), pages.table.stride(0),
            *row_strides(parts.out)[:2], *parts.lse.stride()[:2], **constants, num_warps=4, num_stages=_STAGES,
        )  # fmt: skip
    return parts


def merge_ranks_triton(parts: PackedPartials, out: Tensor, lse: Tensor | None = None) -> None:
    """Run `paged.merge_ranks`."""
    count, rows, heads, head_dim = parts.out.shape
    constants: dict[str, Any] = {"COLS": triton.next_power_of_2(head_dim), "BLOCK": _MERGED}
    with torch.cuda.device(out.get_device()):
        _merge_kernel[(rows * heads,)](
            parts.out, parts.lse, out, parts.lse if lse is None else lse, count, head_dim,
            row_strides(parts.out)[0], parts.lse.stride(0), **constants, WITH_LSE=lse is not None,
        )  # fmt: skip


def num_splits(programs: int, device: torch.device) -> int:
    """Return the number of splits that gives every multiprocessor work, if one split takes `programs` programs."""
    return max(1, min(_MAX_SPLITS, -(-_PER_PROCESSOR * _processors(device) // programs)))


def even_splits(programs: int, device: torch.device) -> int:
    """Return the same for programs that compute rather than wait.

    All multiprocessors should finish together, after up to three rounds of programs. Each further split costs time to
    write and to merge; a single round takes longer than each of several.
    """
    round_ = _PER_PROCESSOR * _processors(device)
    counts = {rounds: min(_MAX_SPLITS, rounds * round_ // programs) for rounds in (1, 2, 3)}
    times = {1: 1.15, 2: 2, 3: 3}
    costs = {splits: times[rounds] / splits * (1 + splits / 100) for rounds, splits in counts.items() if splits}
    return min(costs, key=costs.__getitem__, default=1)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # for the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count
