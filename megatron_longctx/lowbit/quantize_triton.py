"""The functions of `quantize` as fused kernels, which read and write every byte once.

A program handles ROWS groups, each as two halves of HALF elements, because with 4 bits the elements i and i + HALF
share a byte. Ends of ranges in bf16 are handled as the upper 16 bits of fp32. Arguments are not checked: call
`quantize`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_longctx.lowbit.quantize import SMALLEST_STEP, QuantFormat

_TILE = 2048
"""The elements per program."""
# Arguments that kernels are not specialized for: sizes that need not be multiples of 16 for vector loads, and pointers
# to ends of ranges, whose alignment depends on the number of values before them. `count` (ranks) is specialized: if it
# is 1, there is no loop.
_ANY = ["num_chunks", "groups", "end_row"]
_ANYWHERE = ["ends", "to_ends"]
_SMALLEST_STEP: tl.constexpr = tl.constexpr(SMALLEST_STEP)
_INFINITY: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x, UP: tl.constexpr, SHORT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Do what `quantize._rounded` does; a value that is not finite may become any other that is not finite."""
    if SHORT:
        bits = x.to(tl.int32, bitcast=True)
        toward_zero = bits & -65536
        away = (bits != toward_zero) & ((x > 0) if UP else (x < 0))
        x = tl.where(away, toward_zero + 65536, toward_zero).to(tl.float32, bitcast=True)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _load_end(at, inside, SHORT: tl.constexpr):  # type: ignore[no-untyped-def]
    if SHORT:
        end = (tl.load(at, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        end = tl.load(at, mask=inside, other=0.0)
    return end


@triton.jit  # type: ignore[untyped-decorator]
def _store_end(at, end, inside, SHORT: tl.constexpr):  # type: ignore[no-untyped-def]
    if SHORT:
        tl.store(at, (end.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(at, end, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def unpack_add(  # type: ignore[no-untyped-def]
    a, b, values, ends, group, groups, inside,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Add the groups `group` of one message to the two halves a and b, `[ROWS, HALF]` fp32."""
    LEVELS: tl.constexpr = 2**BITS - 2 if SYMMETRIC else 2**BITS - 1
    ZERO: tl.constexpr = LEVELS // 2 if SYMMETRIC else 0
    col = tl.arange(0, HALF)
    low = _load_end(ends + group, inside, SHORT)
    if SYMMETRIC:
        half_range = low
        origin = tl.zeros_like(low)
    else:
        half_range = _load_end(ends + groups + group, inside, SHORT) * 0.5 - low * 0.5
        origin = low
    half_step = (half_range * (1 / LEVELS))[:, None]
    at = values + group[:, None] * (HALF * 2 * BITS // 8) + col[None, :]
    first = tl.load(at, mask=inside[:, None], other=0).to(tl.int32)
    if BITS == 8:
        second = tl.load(at + HALF, mask=inside[:, None], other=0).to(tl.int32)
    else:
        second = first >> 4
        first = first & 15
    half_a = (first - ZERO).to(tl.float32) * half_step
    half_b = (second - ZERO).to(tl.float32) * half_step
    a += (origin[:, None] + half_a) + half_a
    b += (origin[:, None] + half_b) + half_b
    return a, b


@triton.jit  # type: ignore[untyped-decorator]
def quantized(a, b, in_a, in_b, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return two halves, `[ROWS, HALF]` fp32 with 0 outside of in_a and in_b, as integers, and their ranges' ends."""
    LEVELS: tl.constexpr = 2**BITS - 2 if SYMMETRIC else 2**BITS - 1
    ZERO: tl.constexpr = LEVELS // 2 if SYMMETRIC else 0
    if SYMMETRIC:
        high = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        low = -high
    else:
        low = tl.minimum(tl.min(tl.where(in_a, a, float("inf")), 1), tl.min(tl.where(in_b, b, float("inf")), 1))
        high = tl.maximum(tl.max(tl.where(in_a, a, -float("inf")), 1), tl.max(tl.where(in_b, b, -float("inf")), 1))
        # Groups without elements.
        none = low > high
        low = tl.where(none, 0.0, low)
        high = tl.where(none, 0.0, high)
    low = _rounded(low, False, SHORT)
    high = _rounded(high, True, SHORT)
    # Minima ignore NaN, so the elements are checked as well. Rounding may have made ends infinite.
    worst_a = tl.max(tl.where(tl.abs(a) < _INFINITY, 0, 1), 1)
    worst_b = tl.max(tl.where(tl.abs(b) < _INFINITY, 0, 1), 1)
    broken = (worst_a + worst_b > 0) | (tl.abs(low) == _INFINITY) | (tl.abs(high) == _INFINITY)
    low = tl.where(broken, 0.0, low)
    high = tl.where(broken, 0.0, high)

    if SYMMETRIC:
        half_step = high * (1 / LEVELS)
        origin = tl.zeros_like(low)
    else:
        half_step = (high * 0.5 - low * 0.5) * (1 / LEVELS)
        origin = low * 0.5
    usable = half_step > _SMALLEST_STEP
    inverse = tl.where(usable, 1.0 / tl.where(usable, half_step, 1.0), 0.0)[:, None]
    steps_a = (tl.where(broken[:, None], 0.0, a) * 0.5 - origin[:, None]) * inverse + (ZERO + 0.5)
    steps_b = (tl.where(broken[:, None], 0.0, b) * 0.5 - origin[:, None]) * inverse + (ZERO + 0.5)
    first = tl.minimum(tl.maximum(steps_a, 0.0), LEVELS).to(tl.int32)
    second = tl.minimum(tl.maximum(steps_b, 0.0), LEVELS).to(tl.int32)

    nan = tl.full(low.shape, float("nan"), tl.float32)
    return first, second, tl.where(broken, nan, low), tl.where(broken, nan, high)


@triton.jit  # type: ignore[untyped-decorator]
def store_quantized(  # type: ignore[no-untyped-def]
    packed, values, ends, group, groups, inside,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Store the result of `quantized` into groups of one message each."""
    first, second, low, high = packed
    if BITS == 8:
        # One store for whole groups: half as many packets if the memory is another GPU's.
        both = tl.permute(tl.join(first.to(tl.uint8), second.to(tl.uint8)), (0, 2, 1))
        at = values + group[:, None] * (HALF * 2) + tl.arange(0, HALF * 2)[None, :]
        tl.store(at, tl.reshape(both, [first.shape[0], HALF * 2]), mask=inside[:, None])
    else:
        at = values + group[:, None] * HALF + tl.arange(0, HALF)[None, :]
        tl.store(at, (first | (second << 4)).to(tl.uint8), mask=inside[:, None])
    if SYMMETRIC:
        _store_end(ends + group, high, inside, SHORT)
    else:
        _store_end(ends + group, low, inside, SHORT)
        _store_end(ends + groups + group, high, inside, SHORT)


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator]
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x, values, ends, numel, num_chunks, chunk, groups, value_row, end_row,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # division is faster in 32 bits, offsets need 64
    row = (index // groups).to(tl.int64)
    group = (index % groups).to(tl.int64)
    inside = row < num_chunks
    place = group[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    at = row[:, None] * chunk + place
    in_a = (place < chunk) & (at < numel)
    in_b = (place + HALF < chunk) & (at + HALF < numel)
    a = tl.load(x + at, mask=in_a, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=in_b, other=0.0).to(tl.float32)
    at_values = values + (row * value_row)[:, None]
    at_ends = ends + row * end_row
    packed = quantized(a, b, in_a, in_b, BITS, SYMMETRIC, SHORT)
    store_quantized(packed, at_values, at_ends, group, groups, inside, BITS, SYMMETRIC, SHORT, HALF)


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator]
def _unpack_kernel(  # type: ignore[no-untyped-def]
    values, ends, out, numel, num_chunks, chunk, groups, value_row, end_row, count,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the sum of the `count` messages from r on to chunk r of `out`."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # division is faster in 32 bits, offsets need 64
    row = (index // groups).to(tl.int64)
    group = (index % groups).to(tl.int64)
    inside = row < num_chunks
    a = tl.zeros([ROWS, HALF], tl.float32)
    b = tl.zeros([ROWS, HALF], tl.float32)
    at_values = values + (row * value_row)[:, None]
    at_ends = ends + row * end_row
    for _ in range(count):
        a, b = unpack_add(a, b, at_values, at_ends, group, groups, inside, BITS, SYMMETRIC, SHORT, HALF)
        at_values += value_row
        at_ends += end_row
    place = group[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    at = row[:, None] * chunk + place
    tl.store(out + at, a.to(out.dtype.element_ty), mask=(place < chunk) & (at < numel))
    tl.store(out + at + HALF, b.to(out.dtype.element_ty), mask=(place + HALF < chunk) & (at + HALF < numel))


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator]
def _requantize_kernel(  # type: ignore[no-untyped-def]
    values, ends, to_values, to_ends, chunk, groups, value_row, end_row, count,
    BITS: tl.constexpr, TO_BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = group < groups
    a = tl.zeros([ROWS, HALF], tl.float32)
    b = tl.zeros([ROWS, HALF], tl.float32)
    for _ in range(count):
        a, b = unpack_add(a, b, values, ends, group, groups, inside, BITS, SYMMETRIC, SHORT, HALF)
        values += value_row
        ends += end_row
    place = group[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    in_a = place < chunk
    in_b = place + HALF < chunk
    # Padding of the last group does not unpack to 0.
    a = tl.where(in_a, a, 0.0)
    b = tl.where(in_b, b, 0.0)
    packed = quantized(a, b, in_a, in_b, TO_BITS, SYMMETRIC, SHORT)
    store_quantized(packed, to_values, to_ends, group, groups, inside, TO_BITS, SYMMETRIC, SHORT, HALF)


def quantize(x: Tensor, chunk: int, form: QuantFormat, packed: Tensor) -> None:
    parts = _parts(packed, chunk, form)
    groups, constants = form.groups(chunk), _constants(form)
    grid = (triton.cdiv(groups * packed.shape[0], constants["ROWS"]),)
    with torch.cuda.device(x.get_device()):  # a CPU tensor's index, -1, changes nothing
        _quantize_kernel[grid](x, *parts, x.numel(), packed.shape[0], chunk, groups, *_strides(parts), **constants)


def dequantize(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor) -> None:
    _unpack(packed, chunk, form, out, packed.shape[0])


def sum_quantized(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor) -> None:
    _unpack(packed, chunk, form, out, 1)


def _unpack(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor, num_chunks: int) -> None:
    parts = _parts(packed, chunk, form)
    groups, constants = form.groups(chunk), _constants(form)
    sizes = (out.numel(), num_chunks, chunk, groups, *_strides(parts), packed.shape[0] // num_chunks)
    with torch.cuda.device(packed.get_device()):
        _unpack_kernel[(triton.cdiv(groups * num_chunks, constants["ROWS"]),)](*parts, out, *sizes, **constants)


def requantize_sum(packed: Tensor, chunk: int, forms: tuple[QuantFormat, QuantFormat], summed: Tensor) -> None:
    form, to = forms
    parts, to_parts = _parts(packed, chunk, form), _parts(summed, chunk, to)
    groups, constants = form.groups(chunk), _constants(form)
    if groups == 0:
        return
    sizes = (chunk, groups, *_strides(parts), packed.shape[0])
    with torch.cuda.device(packed.get_device()):
        _requantize_kernel[(triton.cdiv(groups, constants["ROWS"]),)](
            *parts, *to_parts, *sizes, TO_BITS=to.bits, **constants
        )


def _parts(packed: Tensor, chunk: int, form: QuantFormat) -> tuple[Tensor, Tensor]:
    """Return the values (uint8) and the ends (fp32, or bf16's bits as int16) of messages."""
    values, ends = form.split(packed, chunk)
    return values, ends.view(torch.int16) if form.range_dtype == torch.bfloat16 else ends


def _strides(parts: tuple[Tensor, Tensor]) -> tuple[int, int]:
    return parts[0].stride(0), parts[1].stride(0)


def _constants(form: QuantFormat) -> dict[str, Any]:
    return {
        # No kernel may fuse multiplications and additions, so that all kernels return the same bits.
        "enable_fp_fusion": False,
        "BITS": form.bits,
        "SYMMETRIC": form.symmetric,
        "SHORT": form.range_dtype == torch.bfloat16,
        "HALF": form.group_size // 2,
        "ROWS": _TILE // form.group_size,
    }
