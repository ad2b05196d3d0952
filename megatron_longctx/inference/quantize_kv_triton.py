"""The functions of `quantize_kv` as fused kernels, without checks: the same bits, each byte read and written once.

A program handles ROWS rows, each one head of one token. The grid's second dimension separates keys and values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.kernels.fused import launch, row_strides

_TILE = 4096
# Arguments without specialized variants: they change with length and batch: numbers that need not be multiples of
# 16 for vector loads. The distance of packed rows is rarely a multiple of 16 bytes.
_ANY = ["num_rows", "batch", "heads", "packed_t", "packed_second", "packed_b", "packed_h"]
_SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-126)
_INFINITY: tl.constexpr = tl.constexpr(float("inf"))
_TO_EVEN: tl.constexpr = tl.constexpr(1.5 * 2**23)
"""Adding and subtracting it rounds small numbers to integers, and halves to even ones."""


@triton.jit  # type: ignore[untyped-decorator]
def _place(num_rows, batch, heads, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether each row of this program exists, and its token, sequence and head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # 32-bit division is faster; offsets need 64 bits
    token = row // heads
    t, b, h = (token // batch).to(tl.int64), (token % batch).to(tl.int64), (row % heads).to(tl.int64)
    return row < num_rows, t, b, h


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=["packed"])  # type: ignore[untyped-decorator]
def _pack_kernel(  # type: ignore[no-untyped-def]
    k, v, packed, num_rows, batch, heads,
    k_t, k_b, k_h, k_d, v_t, v_b, v_h, v_d,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    inside, t, b, h = _place(num_rows, batch, heads, ROWS)
    col = tl.arange(0, COLS)[None, :]
    mask = inside[:, None] & (col < D)
    second = tl.program_id(1)
    if second == 0:
        x = tl.load(k + (t * k_t + b * k_b + h * k_h)[:, None] + col * k_d, mask=mask, other=0.0).to(tl.float32)
    else:
        x = tl.load(v + (t * v_t + b * v_b + h * v_h)[:, None] + col * v_d, mask=mask, other=0.0).to(tl.float32)
    broken = tl.max(tl.where(tl.abs(x) < _INFINITY, 0, 1), 1) > 0  # maxima ignore NaN
    scale = tl.max(tl.where(broken[:, None], 0.0, tl.abs(x)), 1) * (1 / 127)
    usable = scale > _SMALLEST_SCALE
    inverse = tl.where(usable, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(usable, scale, 1.0)), 0.0)
    steps = tl.where(broken[:, None], 0.0, x) * inverse[:, None]
    steps = tl.minimum(tl.maximum((steps + _TO_EVEN) - _TO_EVEN, -127.0), 127.0)
    at = (((t * 2 + second) * batch + b) * heads + h) * (D + 4)
    tl.store(packed + at[:, None] + col, steps.to(tl.int8), mask=mask)
    scales = packed.to(tl.pointer_type(tl.float32), bitcast=True) + (at + D) // 4
    tl.store(scales, tl.where(broken, float("nan"), scale), mask=inside)


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=["packed"])  # type: ignore[untyped-decorator]
def _unpack_kernel(  # type: ignore[no-untyped-def]
    packed, out, num_rows, batch, heads, packed_t, packed_second, packed_b, packed_h,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    inside, t, b, h = _place(num_rows, batch, heads, ROWS)
    col = tl.arange(0, COLS)[None, :]
    mask = inside[:, None] & (col < D)
    second = tl.program_id(1)
    source = t * packed_t + second.to(tl.int64) * packed_second + b * packed_b + h * packed_h
    steps = tl.load(packed + source[:, None] + col, mask=mask, other=0)
    scales = packed.to(tl.pointer_type(tl.float32), bitcast=True) + (source + D) // 4
    scale = tl.load(scales, mask=inside, other=0.0)
    at = (((t * 2 + second) * batch + b) * heads + h) * D
    tl.store(out + at[:, None] + col, (steps.to(tl.float32) * scale[:, None]).to(out.dtype.element_ty), mask=mask)


def pack_kv(k: Tensor, v: Tensor, packed: Tensor) -> None:
    """Pack k, v `[t, b, g, d]` into `[t, 2, b, g, d + 4]` uint8, contiguous."""
    t, batch, heads, d = k.shape
    cols = triton.next_power_of_2(d)
    rows = max(1, _TILE // cols)
    grid = (triton.cdiv(t * batch * heads, rows), 2)
    arguments: list[Tensor | int] = [k, v, packed.view(torch.int8), t * batch * heads, batch, heads]
    arguments += [*row_strides(k), k.stride(-1), *row_strides(v), v.stride(-1)]
    launch(_pack_kernel, grid, arguments, {"D": d, "ROWS": rows, "COLS": cols}, enable_fp_fusion=False)


def unpack_kv(packed: Tensor, out: Tensor) -> None:
    """Unpack `[t, 2, b, g, d + 4]`, rows contiguous, into out `[t, 2, b, g, d]`, contiguous."""
    t, _, batch, heads, d = out.shape
    cols = triton.next_power_of_2(d)
    rows = max(1, _TILE // cols)
    grid = (triton.cdiv(t * batch * heads, rows), 2)
    arguments: list[Tensor | int] = [packed.view(torch.int8), out, t * batch * heads, batch, heads]
    arguments += packed.stride()[:4]
    launch(_unpack_kernel, grid, arguments, {"D": d, "ROWS": rows, "COLS": cols}, enable_fp_fusion=False)
