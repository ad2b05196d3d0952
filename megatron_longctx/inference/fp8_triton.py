"""The functions of `fp8` as fused kernels: rows are quantized in one launch, a single row is within its product.

Arguments are not checked: call `fp8`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.kernels.fused import launch
from .fp8 import SMALLEST

_TILE = 4096
"""The columns that a program quantizes at once."""
VECTOR_TILE = (16, 512, 4)
"""The outputs and inputs that a program of a single row's product handles at once, and its warps."""
WIDE_VECTOR_TILE = (8, 512, 4)
"""The same for weights of two bytes."""
_SMALLEST: tl.constexpr = tl.constexpr(SMALLEST)
_LARGEST: tl.constexpr = tl.constexpr(448.0)
_INFINITY: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def _larger(largest, x):  # type: ignore[no-untyped-def]
    """Return the larger absolute values; for a NaN, which maxima ignore, infinity."""
    x = tl.abs(x)
    return tl.maximum(largest, tl.where(x < _INFINITY, x, _INFINITY))


@triton.jit
def _factors(largest):  # type: ignore[no-untyped-def]
    """Return what quantizes a row whose largest absolute value is among `largest`, and its scale, both `[1]`."""
    largest = tl.maximum(tl.max(largest, 0, keep_dims=True), _SMALLEST)
    return tl.div_rn(tl.full([1], 448.0, tl.float32), largest), largest * (1 / _LARGEST)


@triton.jit(do_not_specialize=["stride"])  # type: ignore[untyped-decorator]
def _quantize_kernel(x, values, scales, stride, columns, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLS)
    largest = tl.zeros([COLS], tl.float32)
    for start in range(0, columns, COLS):
        part = tl.load(x + row * stride + start + col, mask=start + col < columns, other=0.0).to(tl.float32)
        largest = _larger(largest, part)
    factor, scale = _factors(largest)
    tl.store(scales + row + tl.arange(0, 1), scale)
    for start in range(0, columns, COLS):
        inside = start + col < columns
        part = tl.load(x + row * stride + start + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(values + row * columns + start + col, (part * factor).to(tl.float8e4nv), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _vector_kernel(  # type: ignore[no-untyped-def]
    x, values, scales, out, outputs, inputs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, FP8: tl.constexpr
):
    """Quantize the row x again in every program, because it is small beside the weights, and sum products in fp32."""
    col = tl.arange(0, INPUTS)
    if FP8:
        largest = tl.zeros([INPUTS], tl.float32)
        for start in range(0, inputs, INPUTS):
            part = tl.load(x + start + col, mask=start + col < inputs, other=0.0).to(tl.float32)
            largest = _larger(largest, part)
        factor, scale = _factors(largest)
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = row < outputs
    at = values + row[:, None].to(tl.int64) * inputs + col[None, :]
    total = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in tl.range(0, inputs, INPUTS, num_stages=3):  # loads ahead, although there is no matrix product
        inside = start + col < inputs
        token = tl.load(x + start + col, mask=inside, other=0.0).to(tl.float32)
        if FP8:
            token = (token * factor).to(tl.float8e4nv).to(tl.float32)
        weights = tl.load(at + start, mask=is_row[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += weights * token[None, :]
    result = tl.sum(total, 1)
    if FP8:
        result = result * scale * tl.load(scales + row, mask=is_row, other=0.0)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=is_row)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `fp8.quantize_rows`."""
    rows, columns = x.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    cols = min(_TILE, triton.next_power_of_2(columns))
    if rows:
        launch(_quantize_kernel, (rows,), [x, values, scales, x.stride(0), columns], {"COLS": cols}, num_warps=8)
    return values, scales


def vector_product(x: Tensor, values: Tensor, scales: Tensor | None) -> Tensor:
    """Return the product `[1, outputs]` of one row `[1, inputs]` with weights `[outputs, inputs]` of these scales; None
    for weights of the row's dtype."""
    outputs, inputs = values.shape
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    per, at_once, warps = WIDE_VECTOR_TILE if scales is None else VECTOR_TILE
    arguments: list[Tensor | int] = [x, values, values if scales is None else scales, out, outputs, inputs]
    constants = {"OUTPUTS": per, "INPUTS": at_once, "FP8": scales is not None}
    launch(_vector_kernel, (-(-outputs // per),), arguments, constants, num_warps=warps)
    return out
