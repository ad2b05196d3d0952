"""`merge_partials` and `sum_partials` as one fused kernel, and `CopySum`: parts are read once, results written once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fused import launch, row_strides
from .partials import Partial

# The number of elements of the result that one program handles.
_TILE = 2048
# Arguments without specialized variants: they change with length and batch: numbers that need not be multiples of
# 16 for vector loads, and addresses of lse, which are read one at a time.
_OF_PARTIALS = ("start", "stop", "first", "last", "ls", "lb", "lh")
_ANY = ["num_rows", "batch", "heads", "lse_s", "lse_b", "lse_h"]
_ANY += [f"{name}{i}" for i in range(4) for name in _OF_PARTIALS]
_ANYWHERE = ["lse", "l0", "l1", "l2", "l3"]


@triton.jit
def _lse_of(lse, start, stop, first, last, s_stride, b_stride, h_stride, s, b, h, inside):  # type: ignore
    """Load a partial's lse for each row; -inf for rows that it does not cover."""
    covered = inside & (s >= start) & (s < stop) & (h >= first) & (h < last)
    at = lse + (s - start) * s_stride + b * b_stride + (h - first) * h_stride
    return tl.load(at, mask=covered, other=-float("inf")).to(tl.float32)


@triton.jit
def _value_of(value, start, stop, first, last, s_stride, b_stride, h_stride, s, b, h, col, inside):  # type: ignore[no-untyped-def]
    """Load a partial's rows; 0 for rows that it does not cover."""
    covered = (s >= start) & (s < stop) & (h >= first) & (h < last)
    at = value + ((s - start) * s_stride + b * b_stride + (h - first) * h_stride)[:, None] + col[None, :]
    return tl.load(at, mask=inside & covered[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    out, lse, num_rows, batch, heads, head_dim, out_s, out_b, out_h, lse_s, lse_b, lse_h,
    v0, l0, start0, stop0, first0, last0, vs0, vb0, vh0, ls0, lb0, lh0,
    v1, l1, start1, stop1, first1, last1, vs1, vb1, vh1, ls1, lb1, lh1,
    v2, l2, start2, stop2, first2, last2, vs2, vb2, vh2, ls2, lb2, lh2,
    v3, l3, start3, stop3, first3, last3, vs3, vb3, vh3, ls3, lb3, lh3,
    MERGE: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # A row is one head of one token. Row numbers have 32 bits, because 64-bit division takes far more instructions;
    # offsets have 64, because a million tokens of many heads exceed 2**31 elements.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    h = (row % heads).to(tl.int64)
    token = row // heads
    b = (token % batch).to(tl.int64)
    s = (token // batch).to(tl.int64)
    col = tl.arange(0, COLS)
    tile = inside[:, None] & (col < head_dim)[None, :]
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    if MERGE:
        a0 = _lse_of(l0, start0, stop0, first0, last0, ls0, lb0, lh0, s, b, h, inside)
        a1, a2, a3 = a0, a0, a0
        most = a0
        if COUNT > 1:
            a1 = _lse_of(l1, start1, stop1, first1, last1, ls1, lb1, lh1, s, b, h, inside)
            most = tl.maximum(most, a1)
        if COUNT > 2:
            a2 = _lse_of(l2, start2, stop2, first2, last2, ls2, lb2, lh2, s, b, h, inside)
            most = tl.maximum(most, a2)
        if COUNT > 3:
            a3 = _lse_of(l3, start3, stop3, first3, last3, ls3, lb3, lh3, s, b, h, inside)
            most = tl.maximum(most, a3)
        base = tl.where(most == -float("inf"), 0.0, most)  # without keys, -inf minus -inf would be NaN
        w0 = tl.exp(a0 - base)
        total += w0[:, None] * _value_of(v0, start0, stop0, first0, last0, vs0, vb0, vh0, s, b, h, col, tile)
        weights = w0
        if COUNT > 1:
            w1 = tl.exp(a1 - base)
            total += w1[:, None] * _value_of(v1, start1, stop1, first1, last1, vs1, vb1, vh1, s, b, h, col, tile)
            weights += w1
        if COUNT > 2:
            w2 = tl.exp(a2 - base)
            total += w2[:, None] * _value_of(v2, start2, stop2, first2, last2, vs2, vb2, vh2, s, b, h, col, tile)
            weights += w2
        if COUNT > 3:
            w3 = tl.exp(a3 - base)
            total += w3[:, None] * _value_of(v3, start3, stop3, first3, last3, vs3, vb3, vh3, s, b, h, col, tile)
            weights += w3
        empty = weights == 0
        total = total / tl.where(empty, 1.0, weights)[:, None]
        merged = tl.where(empty, -float("inf"), base + tl.log(tl.where(empty, 1.0, weights)))
        # Every warp loads the few lse values itself: none may overwrite values that a slower one has yet to read.
        tl.debug_barrier()
        tl.store(lse + s * lse_s + b * lse_b + h * lse_h, merged, mask=inside)
    else:
        total += _value_of(v0, start0, stop0, first0, last0, vs0, vb0, vh0, s, b, h, col, tile)
        if COUNT > 1:
            total += _value_of(v1, start1, stop1, first1, last1, vs1, vb1, vh1, s, b, h, col, tile)
        if COUNT > 2:
            total += _value_of(v2, start2, stop2, first2, last2, vs2, vb2, vh2, s, b, h, col, tile)
        if COUNT > 3:
            total += _value_of(v3, start3, stop3, first3, last3, vs3, vb3, vh3, s, b, h, col, tile)
    at = out + (s * out_s + b * out_b + h * out_h)[:, None] + col[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=tile)


def combine_triton(partials: Sequence[Partial], out: Tensor, lse: Tensor | None) -> None:
    """Run `merge_partials` (with `lse`) or `sum_partials` (without) on 0 to 4 partials, without checks."""
    s, batch, heads, head_dim = out.shape
    if not partials:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    cols = triton.next_power_of_2(head_dim)
    rows = max(1, _TILE // cols)
    num_rows = s * batch * heads
    into = out if lse is None else lse
    strides = (*row_strides(out), *into.stride()[:3])
    arguments: list[Tensor | int] = [out, into, num_rows, batch, heads, head_dim, *strides]
    for part in partials:
        part_lse = part.value if part.lse is None else part.lse
        arguments += [part.value, part_lse, part.start, part.stop, part.first_head, part.last_head]
        arguments += [*row_strides(part.value), *part_lse.stride()[:3]]
    # 12 arguments of the result and 12 of each partial; the kernel does not read them for missing partials.
    arguments += arguments[12:24] * (4 - len(partials))
    constants = {"MERGE": lse is not None, "COUNT": len(partials), "ROWS": rows, "COLS": cols}
    launch(_combine_kernel, (triton.cdiv(num_rows, rows),), arguments, constants)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_copies_kernel(copies, first, rows, into, width, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = col < width
    total = tl.zeros((COLS,), dtype=tl.float32)
    for i in range(tl.load(first + token), tl.load(first + token + 1)):
        row = tl.load(rows + i).to(tl.int64)
        total += tl.load(copies + row * width + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(into + token * width + col, total.to(into.dtype.element_ty), mask=inside)


def sum_copies_triton(copies: Tensor, first: Tensor, rows: Tensor, into: Tensor) -> None:
    """Run `CopySum` with its table on contiguous tensors, without checks."""
    width = into[0].numel()
    cols = min(1024, triton.next_power_of_2(width))
    grid = into.shape[0], triton.cdiv(width, cols)
    launch(_sum_copies_kernel, grid, (copies, first, rows, into, width), {"COLS": cols})
