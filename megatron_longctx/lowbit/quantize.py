"""Low-bit integers for tensors that are sent to other ranks: quantize and pack, unpack, sum, and quantize sums again.

The format is that of Flash Communication, section 3.2 and appendix A.3: groups of 32 to 128 neighbouring elements share
a range, which b bits divide. A tensor is cut into chunks, one for each rank that will sum it. Each chunk becomes one
row of bytes, its message:

    [values: 8 bits, or 4 (elements i and i + group/2 share a byte)] [low ends] [high ends] [up to 15 bytes of padding]

A group's message has the ends of its range instead of a scale and a zero point: the ends of bf16 values are exact in
bf16, and both sides compute the same step from them. Ends have fp32's exponents, because fp16 would overflow for those
of bf16. They are halved before they are subtracted, because high - low of bf16 values can exceed even fp32's largest
number. `symmetric` sends one end only.

A dequantized element is off by at most half a step of its group. Groups of a single value are restored exactly. A group
with an infinity or a NaN becomes all NaN, so neither is hidden or spreads to other groups. So does a group of sums that
exceed the largest number of `range_dtype`.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from megatron_longctx.core.errors import refuse
from megatron_longctx.core.kernels.fused import load_fused

_fused = partial(load_fused, __name__, "quantizing")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes, of every message
SMALLEST_STEP = 2.0**-126
"""The smallest half step that has a reciprocal in fp32. Groups with a smaller one count as groups of a single value."""


@dataclass(frozen=True)
class QuantFormat:
    """How values are quantized.

    Args:
        bits: 4 or 8 per value.
        group_size: 32, 64 or 128 neighbouring elements that share a range.
        symmetric: ranges are [-a, a]: half the bytes for ranges, up to twice the step.
        range_dtype: of the ends of ranges: bf16 (rounded outward), or fp32.

    Raises:
        ValueError: another value.
    """

    bits: int = 8
    group_size: int = 128
    symmetric: bool = False
    range_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        ranges = (torch.bfloat16, torch.float32)
        for name, allowed in (("bits", (4, 8)), ("group_size", (32, 64, 128)), ("range_dtype", ranges)):
            if getattr(self, name) not in allowed:
                expected = f"one of {', '.join(map(str, allowed))}"
                raise refuse(name, getattr(self, name), expected, "Choose one of these.")

    @property
    def levels(self) -> int:
        """The steps in a range. Symmetric ranges have an even number, so that zero is exact."""
        return (1 << self.bits) - (2 if self.symmetric else 1)

    @property
    def zero(self) -> int:
        """The integer that represents a group's origin: its low end, or 0.0 if symmetric."""
        return self.levels // 2 if self.symmetric else 0

    def groups(self, chunk: int) -> int:
        """Return the number of groups in a chunk of `chunk` elements; the last may be incomplete."""
        return -(-chunk // self.group_size)

    def value_bytes(self, chunk: int) -> int:
        return self.groups(chunk) * self.group_size * self.bits // 8

    def message_bytes(self, chunk: int) -> int:
        """Return the size of a chunk's message."""
        ends = self.groups(chunk) * (1 if self.symmetric else 2) * self.range_dtype.itemsize
        return -(-(self.value_bytes(chunk) + ends) // _ALIGNMENT) * _ALIGNMENT

    def split(self, packed: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """Return views of `[n, message_bytes]`: values `[n, groups, bytes]` uint8 and ends `[n, 2 or 1, groups]`."""
        groups, values = self.groups(chunk), self.value_bytes(chunk)
        num_ends = 1 if self.symmetric else 2
        ends = packed[:, values : values + groups * num_ends * self.range_dtype.itemsize].view(self.range_dtype)
        row = self.group_size * self.bits // 8
        return packed[:, :values].view(len(packed), groups, row), ends.view(len(packed), num_ends, groups)


@dataclass(frozen=True)
class RawFormat:
    """The format of unquantized values of `itemsize` bytes, as kernels over peer memory send them."""

    itemsize: int
    bits: int = 0
    group_size: int = 128
    symmetric: bool = False
    range_dtype: torch.dtype = torch.float32

    def groups(self, chunk: int) -> int:
        return -(-chunk // self.group_size)

    def message_bytes(self, chunk: int) -> int:
        return self.groups(chunk) * self.group_size * self.itemsize

    value_bytes = message_bytes


Format = QuantFormat | RawFormat


@torch.no_grad()
def quantize(x: Tensor, num_chunks: int, chunk: int, form: QuantFormat) -> Tensor:
    """Quantize and pack `x` into one message per chunk.

    Args:
        x: `[N]` contiguous, bf16, fp16 or fp32, N <= num_chunks * chunk. Chunk r is `x[r * chunk : (r + 1) * chunk]`.
            The last chunks may be shorter or empty; all messages have the same length.
        chunk: the elements per chunk.

    Returns:
        `[num_chunks, form.message_bytes(chunk)]` uint8.

    Raises:
        ValueError: a wrong shape, dtype or stride.
    """
    if x.ndim != 1 or not x.is_contiguous() or x.dtype not in DTYPES or x.numel() > num_chunks * chunk:
        raise ValueError(
            f"x of shape {tuple(x.shape)}, strides {x.stride()} and {x.dtype}: expected one contiguous dimension of at "
            f"most {num_chunks} x {chunk} elements in bf16, fp16 or fp32. Flatten, copy or convert it."
        )
    packed = torch.empty(num_chunks, form.message_bytes(chunk), dtype=torch.uint8, device=x.device)
    kernels = _fused() if packed.is_cuda else None
    if packed.numel():
        (kernels.quantize if kernels else _quantize_torch)(x, chunk, form, packed)
    return packed


@torch.no_grad()
def dequantize(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor) -> Tensor:
    """Unpack messages into `out`, chunk after chunk: the inverse of `quantize`.

    Args:
        packed: `[n, message_bytes]` uint8.
        out: `[N]` contiguous, N <= n * chunk, bf16, fp16 or fp32: is written and returned.
    """
    _check(packed, chunk, form)
    kernels = _fused() if packed.is_cuda else None
    if out.numel():
        (kernels.dequantize if kernels else _dequantize_torch)(packed, chunk, form, out)
    return out


@torch.no_grad()
def sum_quantized(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor) -> Tensor:
    """Sum messages in fp32, in their order, and round once into `out`.

    Args:
        packed: `[n, message_bytes]` uint8: the same chunk of n ranks.
        out: `[chunk]` contiguous, bf16, fp16 or fp32: is written and returned.
    """
    _check(packed, chunk, form)
    kernels = _fused() if packed.is_cuda else None
    if out.numel():
        (kernels.sum_quantized if kernels else _sum_torch)(packed, chunk, form, out)
    return out


@torch.no_grad()
def requantize_sum(packed: Tensor, chunk: int, form: QuantFormat, to: QuantFormat) -> Tensor:
    """Sum messages in fp32, in their order, and quantize the sum without rounding it first.

    Args:
        packed: `[n, message_bytes]` uint8: the same chunk of n ranks.
        to: the format of the sum; only its `bits` may differ from `form`.

    Returns:
        `[to.message_bytes(chunk)]` uint8.
    """
    _check(packed, chunk, form)
    if (to.group_size, to.symmetric, to.range_dtype) != (form.group_size, form.symmetric, form.range_dtype):
        raise ValueError(f"to={to}: expected {form}, or the same with other bits. Change it to that.")
    summed = torch.empty(1, to.message_bytes(chunk), dtype=torch.uint8, device=packed.device)
    if packed.is_cuda and (kernels := _fused()):
        kernels.requantize_sum(packed, chunk, (form, to), summed)
    elif chunk:
        total = torch.empty(chunk, device=packed.device)
        _quantize_torch(_sum_torch(packed, chunk, form, total), chunk, to, summed)
    return summed[0]


def _check(packed: Tensor, chunk: int, form: QuantFormat) -> None:
    if packed.ndim != 2 or packed.shape[1] != form.message_bytes(chunk) or not packed.is_contiguous():
        raise ValueError(
            f"packed of shape {tuple(packed.shape)}: expected contiguous rows of {form.message_bytes(chunk)} bytes, "
            f"the messages of {chunk} elements in {form}. Pass the chunk and format of `quantize`."
        )


def _grouped(x: Tensor, num_chunks: int, chunk: int, form: QuantFormat) -> tuple[Tensor, Tensor | None]:
    """Return `x` as fp32 `[n, groups, group]`, and a mask of the elements that are not padding (None: all)."""
    shape = (num_chunks, form.groups(chunk), form.group_size)
    if x.numel() == num_chunks * chunk and chunk % form.group_size == 0:
        return x.float().view(shape), None

    def spread(flat: Tensor) -> Tensor:
        whole = functional.pad(flat, (0, num_chunks * chunk - x.numel())).view(num_chunks, chunk)
        return functional.pad(whole, (0, shape[1] * shape[2] - chunk)).view(shape)

    return spread(x.float()), spread(torch.ones_like(x, dtype=torch.bool))


def _ends(values: Tensor, inside: Tensor | None, form: QuantFormat) -> tuple[Tensor, ...]:
    """Return the ends of the groups' ranges, `[n, groups]` fp32, exact in `range_dtype`: (low, high), or (a,)."""
    if form.symmetric:  # the padding, 0, is never the largest absolute value
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
    """Round fp32 `x` outward to `range_dtype`, so that the range still contains it."""
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
    """Quantize in plain PyTorch: the reference, and the implementation on CPU."""
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
    """Return `[n, groups * group]` fp32."""
    stored, stored_ends = form.split(packed, chunk)
    integers = stored if form.bits == 8 else torch.cat([stored & 15, stored >> 4], -1)
    ends = stored_ends.float().unbind(1)
    # Half of the offset is added twice, so that no intermediate result overflows.
    half = (integers.float() - form.zero).mul_(_half_step(ends, form).unsqueeze(-1))
    origin = half if form.symmetric else half + ends[0].unsqueeze(-1)
    return (origin + half).flatten(1)


def _dequantize_torch(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor) -> None:
    out.copy_(_unpacked(packed, chunk, form)[:, :chunk].flatten()[: out.numel()])


def _sum_torch(packed: Tensor, chunk: int, form: QuantFormat, out: Tensor) -> Tensor:
    total = _unpacked(packed[:1], chunk, form)
    for row in range(1, len(packed)):  # one by one, like the fused kernel
        total += _unpacked(packed[row : row + 1], chunk, form)
    return out.copy_(total[0, :chunk])
