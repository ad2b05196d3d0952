"""Reductions among GPUs that can write each other's memory, each in one kernel: pack, push, wait, sum, push, unpack.

A block handles the same groups of every chunk in all steps and on all ranks, because it waits for the same block of the
peers (see `lowbit.peer_flags`). Arguments are not checked: call `quantized`.
"""

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.kernels.fused import launch, specialization_of
from .peer_flags import end_call, signal_peers, wait_for_peers
from .peer_memory import MAX_BLOCKS, PeerMemory
from .quantize import Format
from .quantize_triton import quantized, store_quantized, unpack_add

_SMALL, _LARGE = (4096, 4), (16384, 16)
"""The elements that a block handles at once, and its warps. Few blocks with much work need many loads in flight."""
# Arguments that kernels are not specialized for. `numel`, `chunk` and `stride` are: vector loads need multiples of 16.
_ANY = ["me", "groups", "per", "row", "values", "to_row", "to_values", "width"]
PUSH, SUM, UNPACK = 1, 2, 4
ALL = PUSH | SUM | UNPACK


@triton.jit  # type: ignore[untyped-decorator]
def _put(  # type: ignore[no-untyped-def]
    packed, in_a, in_b, base, like, value_bytes, group, groups, inside,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write the result of `_packed` into groups of the messages at the addresses `base`, `[ROWS]`."""
    base = tl.multiple_of(base, 16)
    if BITS == 0:
        to = tl.multiple_of(base.to(tl.pointer_type(like.dtype.element_ty)), 16)[:, None]
        at = to + group[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
        tl.store(at, packed[0].to(like.dtype.element_ty), mask=in_a)
        tl.store(at + HALF, packed[1].to(like.dtype.element_ty), mask=in_b)
    else:
        values = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 16)[:, None]
        ends = (base + value_bytes).to(tl.pointer_type(tl.int16 if SHORT else tl.float32))
        store_quantized(packed, values, ends, group, groups, inside, BITS, SYMMETRIC, SHORT, HALF)


@triton.jit  # type: ignore[untyped-decorator]
def _packed(a, b, in_a, in_b, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr):  # type: ignore[no-untyped-def]
    if BITS == 0:  # noqa: SIM108 (decided while compiling)
        packed = (a, b, a, b)
    else:
        packed = quantized(a, b, in_a, in_b, BITS, SYMMETRIC, SHORT)
    return packed


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    a, b, in_a, in_b, base, like, value_bytes, group, groups, inside,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Add groups of the messages at the addresses `base`, `[ROWS]`, to the halves a and b."""
    base = tl.multiple_of(base, 16)
    if BITS == 0:
        source = tl.multiple_of(base.to(tl.pointer_type(like.dtype.element_ty)), 16)[:, None]
        at = source + group[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
        a += tl.load(at, mask=in_a, other=0.0).to(tl.float32)
        b += tl.load(at + HALF, mask=in_b, other=0.0).to(tl.float32)
    else:
        values = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 16)[:, None]
        ends = (base + value_bytes).to(tl.pointer_type(tl.int16 if SHORT else tl.float32))
        a, b = unpack_add(a, b, values, ends, group, groups, inside, BITS, SYMMETRIC, SHORT, HALF)
    return a, b


@triton.jit(do_not_specialize=_ANY)  # type: ignore[untyped-decorator]
def _two_step_kernel(  # type: ignore[no-untyped-def]
    x, out, data, flags, state,
    me, half_bytes, numel, chunk, stride, groups, per, row, values, to_row, to_values,
    BITS: tl.constexpr, TO_BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, SUM_ROWS: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, MAX: tl.constexpr,
    SCATTER: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    """Sum chunk r, `x[r * stride : r * stride + chunk]`, on rank r, and write it to its `out` if SCATTER, else to all.

    A half of the memory contains a message of `row` bytes from each rank, then a sum of `to_row` bytes from each rank.
    """
    epoch = tl.load(state) + 1
    half = (epoch & 1) * half_bytes
    first = tl.program_id(0) * per
    count = tl.minimum(per, groups - first)
    here = tl.load(data + me) + half
    col = tl.arange(0, HALF)[None, :]
    if PHASES & 1:
        for start in range(0, WORLD * count, ROWS):
            index = start + tl.arange(0, ROWS)
            inside = index < WORLD * count
            rank = (index // count + me + 1) % WORLD  # each rank begins with another peer
            group = first + index % count
            place = group[:, None].to(tl.int64) * (2 * HALF) + col
            at = rank[:, None].to(tl.int64) * stride + place
            in_a = inside[:, None] & (place < chunk) & (at < numel)
            in_b = inside[:, None] & (place + HALF < chunk) & (at + HALF < numel)
            a = tl.load(x + at, mask=in_a, other=0.0).to(tl.float32)
            b = tl.load(x + at + HALF, mask=in_b, other=0.0).to(tl.float32)
            base = tl.load(data + rank, mask=inside, other=0) + half + me * row
            packed = _packed(a, b, in_a, in_b, BITS, SYMMETRIC, SHORT)
            _put(packed, in_a, in_b, base, x, values, group, groups, inside, BITS, SYMMETRIC, SHORT, HALF)
        signal_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
    if PHASES & 2:
        wait_for_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
        for start in range(0, count, SUM_ROWS):
            index = start + tl.arange(0, SUM_ROWS)
            inside = index < count
            group = first + index
            place = group[:, None].to(tl.int64) * (2 * HALF) + col
            in_a = inside[:, None] & (place < chunk)
            in_b = inside[:, None] & (place + HALF < chunk)
            a = tl.zeros([SUM_ROWS, HALF], tl.float32)
            b = tl.zeros([SUM_ROWS, HALF], tl.float32)
            for source in tl.static_range(WORLD):
                base = tl.zeros([SUM_ROWS], tl.int64) + (here + source * row)
                a, b = _add(a, b, in_a, in_b, base, x, values, group, groups, inside, BITS, SYMMETRIC, SHORT, HALF)
            if SCATTER:
                tl.store(out + place, a.to(out.dtype.element_ty), mask=in_a)
                tl.store(out + place + HALF, b.to(out.dtype.element_ty), mask=in_b)
            else:
                # Padding of the last group does not unpack to 0.
                a = tl.where(in_a, a, 0.0)
                b = tl.where(in_b, b, 0.0)
                packed = _packed(a, b, in_a, in_b, TO_BITS, SYMMETRIC, SHORT)
                for shift in range(1, WORLD + 1):
                    there = tl.load(data + (me + shift) % WORLD) + half + (WORLD * row + me * to_row)
                    base = tl.zeros([SUM_ROWS], tl.int64) + there
                    _put(packed, in_a, in_b, base, x, to_values, group, groups, inside, TO_BITS, SYMMETRIC, SHORT, HALF)
        if not SCATTER:
            signal_peers(flags, me, epoch, 1, WORLD, LANES, MAX)
    if PHASES & 4:
        if not SCATTER:
            wait_for_peers(flags, me, epoch, 1, WORLD, LANES, MAX)
            for start in range(0, WORLD * count, ROWS):
                index = start + tl.arange(0, ROWS)
                inside = index < WORLD * count
                rank = index // count
                group = first + index % count
                place = group[:, None].to(tl.int64) * (2 * HALF) + col
                at = rank[:, None].to(tl.int64) * stride + place
                in_a = inside[:, None] & (place < chunk) & (at < numel)
                in_b = inside[:, None] & (place + HALF < chunk) & (at + HALF < numel)
                a = tl.zeros([ROWS, HALF], tl.float32)
                b = tl.zeros([ROWS, HALF], tl.float32)
                base = here + WORLD * row + rank.to(tl.int64) * to_row
                a, b = _add(
                    a, b, in_a, in_b, base, x, to_values, group, groups, inside, TO_BITS, SYMMETRIC, SHORT, HALF
                )
                tl.store(out + at, a.to(out.dtype.element_ty), mask=in_a)
                tl.store(out + at + HALF, b.to(out.dtype.element_ty), mask=in_b)
        end_call(state, epoch)


@triton.jit(do_not_specialize=_ANY)  # type: ignore[untyped-decorator]
def _one_step_kernel(  # type: ignore[no-untyped-def]
    x, out, data, flags, state,
    me, half_bytes, numel, groups, per, row, values, width,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SHORT: tl.constexpr, HALF: tl.constexpr, SUM_ROWS: tl.constexpr,
    GATHER: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, MAX: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    """Send the whole message to all ranks, and sum the messages of all ranks.

    If GATHER, put them side by side instead, in rows of `width` elements of each rank; 2 if groups divide these rows.
    """
    epoch = tl.load(state) + 1
    half = (epoch & 1) * half_bytes
    first = tl.program_id(0) * per
    count = tl.minimum(per, groups - first)
    col = tl.arange(0, HALF)[None, :]
    if PHASES & 1:
        for start in range(0, count, SUM_ROWS):
            index = start + tl.arange(0, SUM_ROWS)
            inside = index < count
            group = first + index
            place = group[:, None] * (2 * HALF) + col
            in_a = inside[:, None] & (place < numel)
            in_b = inside[:, None] & (place + HALF < numel)
            a = tl.load(x + place, mask=in_a, other=0.0).to(tl.float32)
            b = tl.load(x + place + HALF, mask=in_b, other=0.0).to(tl.float32)
            packed = _packed(a, b, in_a, in_b, BITS, SYMMETRIC, SHORT)
            for shift in range(1, WORLD + 1):
                base = tl.zeros([SUM_ROWS], tl.int64) + (tl.load(data + (me + shift) % WORLD) + half + me * row)
                _put(packed, in_a, in_b, base, x, values, group, groups, inside, BITS, SYMMETRIC, SHORT, HALF)
        signal_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
    if PHASES & 2:
        wait_for_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
        here = tl.load(data + me) + half
        for start in range(0, count, SUM_ROWS):
            index = start + tl.arange(0, SUM_ROWS)
            inside = index < count
            group = first + index
            place = group[:, None] * (2 * HALF) + col
            in_a = inside[:, None] & (place < numel)
            in_b = inside[:, None] & (place + HALF < numel)
            a = tl.zeros([SUM_ROWS, HALF], tl.float32)
            b = tl.zeros([SUM_ROWS, HALF], tl.float32)
            for source in tl.static_range(WORLD):
                base = tl.zeros([SUM_ROWS], tl.int64) + (here + source * row)
                a, b = _add(a, b, in_a, in_b, base, x, values, group, groups, inside, BITS, SYMMETRIC, SHORT, HALF)
                if GATHER == 2:  # places are computed once for a group, whose values are neighbours
                    begin = group * (2 * HALF)
                    line = tl.multiple_of((begin // width * WORLD + source) * width + begin % width, 2 * HALF)
                    at = out + line[:, None] + col
                    tl.store(at, a.to(out.dtype.element_ty), mask=in_a)
                    tl.store(at + HALF, b.to(out.dtype.element_ty), mask=in_b)
                if GATHER == 1:
                    at = out + (place // width * WORLD + source) * width + place % width
                    tl.store(at, a.to(out.dtype.element_ty), mask=in_a)
                    after = place + HALF
                    at = out + (after // width * WORLD + source) * width + after % width
                    tl.store(at, b.to(out.dtype.element_ty), mask=in_b)
                if GATHER:
                    a = tl.zeros([SUM_ROWS, HALF], tl.float32)
                    b = tl.zeros([SUM_ROWS, HALF], tl.float32)
            if not GATHER:
                tl.store(out + place, a.to(out.dtype.element_ty), mask=in_a)
                tl.store(out + place + HALF, b.to(out.dtype.element_ty), mask=in_b)
        end_call(state, epoch)


def two_step(
    memory: PeerMemory,
    x: Tensor,
    out: Tensor,
    forms: tuple[Format, Format],
    *,
    chunk: int,
    stride: int,
    scatter: bool = False,
    phases: int = ALL,
) -> None:
    """Sum chunk r, the `chunk` elements from `r * stride` on, on rank r, and send the sum to all unless `scatter`.

    Args:
        x: contiguous; the last chunk may be shorter.
        out: contiguous, of x's dtype. It may be x itself unless `scatter`.
        forms: of the values and of their sums, which may differ only in bits.
        phases: PUSH, SUM, UNPACK or all; separate launches allow tests to simulate ranks in one process.
    """
    call = _two_steps(memory.world, memory.blocks, x.numel(), forms, chunk, stride, scatter, phases)
    _launch(_two_step_kernel, memory, x, out, call)


def one_step(
    memory: PeerMemory, x: Tensor, out: Tensor, form: Format, phases: int = ALL, width: int | None = None
) -> None:
    """Sum all of x on every rank. Arguments are as for `two_step`, without UNPACK.

    Args:
        width: gather the ranks' rows of this many elements side by side, into `out` of all of them, and sum nothing.
    """
    _launch(_one_step_kernel, memory, x, out, _one_step(memory.world, memory.blocks, x.numel(), form, phases, width))


class _Call(NamedTuple):
    """What a launch needs beside tensors. It is the same for all tensors of a size, and the host computes it once."""

    blocks: int
    numbers: tuple[int, ...]
    kinds: tuple[Hashable, ...]  # by which Triton selects a variant for these numbers
    constants: dict[str, int]
    warps: int


@functools.lru_cache(maxsize=1024)
def _two_steps(
    world: int, most: int, numel: int, forms: tuple[Format, Format], chunk: int, stride: int, scatter: bool, phases: int
) -> _Call:
    first, second = forms
    groups = first.groups(chunk)
    per, blocks, rows, warps = _work_split(most, groups, world, first.group_size)
    rows_of = [size for form in forms for size in (form.message_bytes(chunk), form.value_bytes(chunk))]
    numbers = (numel, chunk, stride, groups, per, *rows_of)
    sizes = _constants(first) | {"ROWS": rows, "SUM_ROWS": rows // 4 if per <= rows // 4 else rows} | _ranks(world)
    constants = {"BITS": first.bits, "TO_BITS": second.bits, **sizes, "SCATTER": scatter, "PHASES": phases}
    return _Call(blocks, numbers, tuple(map(specialization_of, numbers)), constants, warps)


@functools.lru_cache(maxsize=1024)
def _one_step(world: int, most: int, numel: int, form: Format, phases: int, width: int | None) -> _Call:
    groups = form.groups(numel)
    per, blocks, rows, warps = _work_split(most, groups, 1, form.group_size)
    numbers = (numel, groups, per, form.message_bytes(numel), form.value_bytes(numel), width or 1)
    gather = 0 if width is None else 1 + (width % form.group_size == 0)
    sizes = _constants(form) | {"SUM_ROWS": rows // 4 if per <= rows // 4 else rows, "GATHER": gather}
    constants = {"BITS": form.bits, **sizes, **_ranks(world), "PHASES": phases & (PUSH | SUM)}
    return _Call(blocks, numbers, tuple(map(specialization_of, numbers)), constants, warps)


def _work_split(most: int, groups: int, chunks: int, group_size: int) -> tuple[int, int, int, int]:
    """Return the groups (of each of `chunks` chunks) per block, the blocks, the groups at once, and the warps."""
    tile, warps = _SMALL
    if groups * chunks * group_size > most * 2 * tile:
        tile, warps = _LARGE
    rows = tile // group_size
    per = max(-(-groups // most), -(-rows // (chunks * 4)))
    return per, -(-groups // per), rows, warps


def _launch(kernel: Any, memory: PeerMemory, x: Tensor, out: Tensor, call: _Call) -> None:
    kinds = call.kinds, specialization_of(x), specialization_of(out)
    arguments: list[Tensor | int] = [x, out, memory.data, memory.flags, memory.state, memory.rank, memory.half_bytes]
    # Without fusion, so that the bits equal the kernels' in `quantize_triton`.
    options = {"num_warps": call.warps, "enable_fp_fusion": False}
    launch(kernel, (call.blocks,), [*arguments, *call.numbers], call.constants, kinds, **options)


def _constants(form: Format) -> dict[str, Any]:
    short = form.range_dtype == torch.bfloat16
    return {"SYMMETRIC": form.symmetric, "SHORT": short, "HALF": form.group_size // 2}


def _ranks(world: int) -> dict[str, int]:
    return {"WORLD": world, "LANES": triton.next_power_of_2(world), "MAX": MAX_BLOCKS}
