"""Low-bit integers for tensors on their way to other ranks: quantize and pack, unpack, sum, quantize the sum again.

Flash Communication, section 3.2 and appendix A.3: groups of 32 to 128 neighbours share a range that b bits divide. A
tensor is cut into chunks, one for each rank that will sum it, and each chunk becomes one row of bytes, its message:

    [values: 8 bits, or 4 (elements i and i + group/2 share a byte)] [low ends] [high ends] [up to 15 bytes of padding]

The ends of a group's range travel instead of its scale and zero point: those of bf16 values are exact in bf16, and both
sides compute the same step from them. They have fp32's exponents (fp16 would overflow on bf16's), and are computed with
by halves, since high - low of bf16 values may pass even fp32's largest. `symmetric` sends one end only.

An element comes back with an error of at most half a step of its group (`error_bound`). Groups of one value come back
as they are. A group with an infinity or a NaN comes back as NaN throughout: never hidden, never spread to other groups;
so does one whose sum passes the largest number of `range_dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from megatron_longctx.kernels.fused import load_fused

_fused = partial(load_fused, __name__, "quantizing")

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes, of every message
_RAW_GROUP = 128
SMALLEST_STEP = 2.0**-126
"""Half a step below this has no reciprocal in fp32: such groups count as of one value."""


@dataclass(frozen=True)
class QuantFormat:
    """How values are quantized.

    Args:
        bits: of a value: 4 or 8.
        group_size: neighbours that share a range: 32, 64 or 128.
        symmetric: ranges are [-a, a]: half the bytes for ranges, up to twice the step.
        range_dtype: of the ends of ranges: bf16 (rounded outward), or fp32.

    Raises:
        ValueError: a value that is not offered.
    """

    bits: int = 8
    group_size: int = 128
    symmetric: bool = False
    range_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name, allowed in (
            ("bits", BITS),
            ("group_size", GROUP_SIZES),
            ("range_dtype", (torch.bfloat16, torch.float32)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"{name}={value}: expected one of {', '.join(map(str, allowed))}. Choose one of these."
                )

    @property
    def levels(self) -> int:
        """Steps from one end of a range to the other. Symmetric ranges have an even number, so that zero is exact."""
        return (1 << self.bits) - (2 if self.symmetric else 1)

    @property
    def zero(self) -> int:
        """The stored integer of a group's origin: its low end, or 0 if symmetric."""
        return self.levels // 2 if self.symmetric else 0

    def groups(self, chunk: int) -> int:
        """Groups of a chunk of so many elements; the last may be ragged."""
        return -(-chunk // self.group_size)

    def value_bytes(self, chunk: int) -> int:
        return self.groups(chunk) * self.group_size * self.bits // 8

    def message_bytes(self, chunk: int) -> int:
        """Bytes of a chunk's message."""
        ends = self.groups(chunk) * (1 if self.symmetric else 2) * self.range_dtype.itemsize
        return -(-(self.value_bytes(chunk) + ends) // _ALIGNMENT) * _ALIGNMENT

    def split(self, packed: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """Views of messages `[n, message_bytes]`: values `[n, groups, bytes]` uint8 and ends `[n, 2 or 1, groups]`."""
        groups, values = self.groups(chunk), self.value_bytes(chunk)
        num_ends = 1 if self.symmetric else 2
        ends = packed[:, values : values + groups * num_ends * self.range_dtype.itemsize].view(self.range_dtype)
        row = self.group_size * self.bits // 8
        return packed[:, :values].view(len(packed), groups, row), ends.view(len(packed), num_ends, groups)


@dataclass(frozen=True)
class Wire:
    """How values that are summed travel: quantized (form), or as they are (None) in x's dtype."""

    form: QuantFormat | None
    itemsize: int

    @property
    def group_size(self) -> int:
        return self.form.group_size if self.form else _RAW_GROUP

    @property
    def group_bytes(self) -> int:
        """Of a group, in a message of many."""
        return self.message_bytes(16 * self.group_size) // 16

    def groups(self, chunk: int) -> int:
        return -(-chunk // self.group_size)

    def value_bytes(self, chunk: int) -> int:
        return self.form.value_bytes(chunk) if self.form else self.groups(chunk) * _RAW_GROUP * self.itemsize

    def message_bytes(self, chunk: int) -> int:
        return self.form.message_bytes(chunk) if self.form else self.value_bytes(chunk)


@torch.no_grad()
def quantize(x: Tensor, num_chunks: int, chunk: int, form: QuantFormat) -> Tensor:
    """Quantize and pack `x` into one message a chunk.

    Args:
        x: `[N]` contiguous, bf16, fp16 or fp32, N <= num_chunks * chunk; chunk r is `x[r * chunk : (r + 1) * chunk]`
            (chunks past the end are shorter or empty; their messages are as long as the others').
        chunk: elements of a chunk.

    Returns:
        `[num_chunks, form.message_bytes(chunk)]` uint8.

    Raises:
        ValueError: a shape, dtype or stride that does not fit.
    """
    if x.ndim != 1 or not x.is_contiguous() or x.dtype not in DTYPES or x.numel() > num_chunks * chunk:
        raise ValueError(
            f"x of shape {tuple(x.shape)}, strides {x.stride()} and {x.dtype}: expected one contiguous dimension of at "
            f"most {num_chunks} x {chunk} elements in bf16, fp16 or fp32. Flatten, copy or convert it."
        )
    packed = torch.empty(num_chunks, form.message_bytes(chunk), dtype=torch.uint8, device=x.device)
    twin = _fused() if packed.is_cuda else None
    if packed.numel():
        (twin.quantize if twin else _quantize_torch)(x, chunk, form, packed)
    return packed


@torch.no_grad()
def dequantize(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor) -> Tensor:
    """The inverse of `quantize`: chunks one after another into `out`.

    Args:
        packed: `[n, message_bytes]` uint8.
        out: `[N]` contiguous, N <= n * chunk, bf16, fp16 or fp32: is written and returned.
    """
    _check(packed, chunk, form)
    twin = _fused() if packed.is_cuda else None
    if out.numel():
        (twin.dequantize if twin else _dequantize_torch)(packed, chunk, form, out)
    return out


@torch.no_grad()
def sum_quantized(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor) -> Tensor:
    """The sum over messages, in fp32 and in their order, rounded once into `out`.

    Args:
        packed: `[n, message_bytes]` uint8: the same chunk as n ranks have it.
        out: `[chunk]` contiguous, bf16, fp16 or fp32: is written and returned.
    """
    _check(packed, chunk, form)
    twin = _fused() if packed.is_cuda else None
    if out.numel():
        (twin.sum_quantized if twin else _sum_torch)(packed, chunk, form, out)
    return out


@torch.no_grad()
def requantize_sum(packed: Tensor, chunk: int, form: QuantFormat, to: QuantFormat) -> Tensor:
    """The sum over messages (fp32, in their order), quantized again without being rounded before.

    Args:
        packed: `[n, message_bytes]` uint8: the same chunk as n ranks have it.
        to: the sum's format; only its `bits` may differ from form's.

    Returns:
        `[to.message_bytes(chunk)]` uint8.
    """
    _check(packed, chunk, form)
    if (to.group_size, to.symmetric, to.range_dtype) != (form.group_size, form.symmetric, form.range_dtype):
        raise ValueError(f"to={to}: expected {form} with other bits at most. Change it to that.")
    summed = torch.empty(1, to.message_bytes(chunk), dtype=torch.uint8, device=packed.device)
    if packed.is_cuda and (twin := _fused()):
        twin.requantize_sum(packed, chunk, (form, to), summed)
    elif chunk:
        total = torch.empty(chunk, device=packed.device)
        _quantize_torch(_sum_torch(packed, chunk, form, total), chunk, to, summed)
    return summed[0]


@torch.no_grad()
def error_bound(x: Tensor, chunk: int, form: QuantFormat) -> Tensor:
    """`[N]` fp32: how far each element of `x` may be from what `dequantize` gives for it in fp32.

    Half a step of its group, and what fp32 rounds on the way. NaN in groups with an infinity or a NaN.
    """
    num_chunks = -(-x.numel() // chunk)
    ends = _ends(*_grouped(x, num_chunks, chunk, form), form)
    half_step = _half_step(ends, form)
    largest = torch.maximum(ends[0].abs(), ends[-1].abs())
    bound = half_step * (1 + 2.0**-11) + largest * 2.0**-22 + 2 * form.levels * SMALLEST_STEP
    each = bound.unsqueeze(-1).expand(-1, -1, form.group_size)
    return each.flatten(1)[:, :chunk].flatten()[: x.numel()]


def _check(packed: Tensor, chunk: int, form: QuantFormat) -> None:
    if packed.ndim != 2 or packed.shape[1] != form.message_bytes(chunk) or not packed.is_contiguous():
        raise ValueError(
            f"packed of shape {tuple(packed.shape)}: expected contiguous rows of {form.message_bytes(chunk)} bytes, "
            f"the messages of {chunk} elements in {form}. Give the chunk and format they were made with."
        )


def _grouped(x: Tensor, num_chunks: int, chunk: int, form: QuantFormat) -> tuple[Tensor, Tensor | None]:
    """`x` as fp32 `[n, groups, group]`, and which of these are elements of it (None: all)."""
    shape = (num_chunks, form.groups(chunk), form.group_size)
    if x.numel() == num_chunks * chunk and chunk % form.group_size == 0:
        return x.float().view(shape), None

    def spread(flat: Tensor) -> Tensor:
        whole = functional.pad(flat, (0, num_chunks * chunk - x.numel())).view(num_chunks, chunk)
        return functional.pad(whole, (0, shape[1] * shape[2] - chunk)).view(shape)

    return spread(x.float()), spread(torch.ones_like(x, dtype=torch.bool))


def _ends(values: Tensor, inside: Tensor | None, form: QuantFormat) -> tuple[Tensor, ...]:
    """Ends of every group's range, `[n, groups]` fp32 (representable in `range_dtype`): (low, high), or (a,)."""
    if form.symmetric:  # padding is 0, which no absolute value is below
        ends: tuple[Tensor, ...] = (_rounded(values.abs().amax(-1), form, up=True),)
    else:
        smallest = values if inside is None else values.where(inside, torch.inf)
        largest = values if inside is None else values.where(inside, -torch.inf)
        low, high = smallest.amin(-1), largest.amax(-1)
        if inside is not None:
            some = inside.any(-1)
            low, high = low.where(some, 0.0), high.where(some, 0.0)
        ends = (_rounded(low, form, up=False), _rounded(high, form, up=True))
    finite = ends[0].isfinite() & ends[-1].isfinite()
    return tuple(end.where(finite, torch.nan) for end in ends)


def _rounded(x: Tensor, form: QuantFormat, *, up: bool) -> Tensor:
    """fp32 `x` rounded up or down to `range_dtype`, so that the range still holds it."""
    if form.range_dtype == torch.float32:
        return x
    bits = x.view(torch.int32)
    toward_zero = bits & -65536
    away = (bits != toward_zero) & ((x > 0) if up else (x < 0))
    rounded = (toward_zero + away.int() * 65536).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)


def _half_step(ends: tuple[Tensor, ...], form: QuantFormat) -> Tensor:
    half_range = ends[0] if form.symmetric else ends[1] * 0.5 - ends[0] * 0.5
    return half_range * (1 / form.levels)


def _quantize_torch(x: Tensor, chunk: int, form: QuantFormat, packed: Tensor) -> None:
    """`quantize` in plain PyTorch: the reference, and the way on CPU."""
    values, inside = _grouped(x, packed.shape[0], chunk, form)
    ends = _ends(values, inside, form)
    half_step = _half_step(ends, form)
    inverse = torch.where(half_step > SMALLEST_STEP, 1 / half_step, 0.0)
    steps = values * 0.5 if form.symmetric else values * 0.5 - ends[0].unsqueeze(-1) * 0.5
    steps = steps.mul_(inverse.unsqueeze(-1)).add_(form.zero + 0.5)
    broken = half_step.isnan()
    if broken.any():
        steps[broken] = form.zero
    integers = steps.clamp_(0, form.levels).to(torch.uint8)
    into, into_ends = form.split(packed, chunk)
    if form.bits == 8:
        into.copy_(integers)
    else:
        low, high = integers.chunk(2, -1)
        torch.bitwise_or(low, high << 4, out=into)
    into_ends.copy_(torch.stack(ends, 1))


def _unpacked(packed: Tensor, chunk: int, form: QuantFormat) -> Tensor:
    """`[n, groups * group]` fp32."""
    stored, stored_ends = form.split(packed, chunk)
    integers = stored if form.bits == 8 else torch.cat([stored & 15, stored >> 4], -1)
    ends = stored_ends.float().unbind(1)
    # An overflow cannot come between: half a range is added twice.
    half = (integers.float() - form.zero).mul_(_half_step(ends, form).unsqueeze(-1))
    origin = half if form.symmetric else half + ends[0].unsqueeze(-1)
    return (origin + half).flatten(1)


def _dequantize_torch(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor) -> None:
    out.copy_(_unpacked(packed, chunk, form)[:, :chunk].flatten()[: out.numel()])


def _sum_torch(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor) -> Tensor:
    total = _unpacked(packed[:1], chunk, form)
    for row in range(1, len(packed)):  # one after another, as the fused kernel does
        total += _unpacked(packed[row : row + 1], chunk, form)
    return out.copy_(total[0, :chunk])
