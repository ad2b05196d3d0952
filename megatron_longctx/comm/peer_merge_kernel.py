"""The kernel of `peer_merge`: a rank's partial results are merged, given to all ranks, and all ranks' merged, in one.

Blocks, flags, halves of the memory and calls: see `peer_flags`. Arguments are not checked.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..kernels.fused import row_strides
from ..kernels.paged import PackedPartials
from .peer_flags import await_peers, end_call, tell
from .peer_memory import MOST_BLOCKS, PeerMemory

PUSH, MERGE = 1, 2
ALL = PUSH | MERGE
_SMALL, _LARGE = (16, 4), (128, 16)
"""Partial results of one or several items that a block loads at once, and its warps: of decode, and of prompts
(docs/decisions.md)."""
_MOST_SMALL = 128
"""Partial results of a block, up to which it is decode's."""


@triton.jit
def _base_of(most):  # type: ignore[no-untyped-def]
    """What exponents are taken from: where nothing is, -inf minus -inf would be NaN."""
    return tl.where(most == -float("inf"), 0.0, most)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["me", "row", "count", "items", "per", "lse_stride"], do_not_specialize_on_alignment=["lse"]
)
def _merge_over_peers_kernel(  # type: ignore[no-untyped-def]
    parts, lse, out, data, flags, state, me, room, row, count, items, per, head_dim, part_stride, lse_stride,
    COLS: tl.constexpr, PARTS: tl.constexpr, ITEMS: tl.constexpr,
    WORLD: tl.constexpr, LANES: tl.constexpr, MOST: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    """An item is a head of a query. A message has the values of all items, `[items, head_dim]` fp32, then their lse."""
    epoch = tl.load(state) + 1
    half = (epoch & 1) * room
    first = tl.program_id(0) * per
    stop = tl.minimum(first + per, items)
    col = tl.arange(0, COLS)
    real = (col < head_dim)[None, :]
    if PHASES & 1:
        for start in range(first, stop, ITEMS):
            item = start + tl.arange(0, ITEMS)
            inside = item < stop
            most = tl.full((ITEMS,), -float("inf"), dtype=tl.float32)
            weights = tl.zeros((ITEMS,), dtype=tl.float32)
            total = tl.zeros((ITEMS, COLS), dtype=tl.float32)
            for begin in range(0, count, PARTS):
                part = begin + tl.arange(0, PARTS)
                there = inside[:, None] & (part < count)[None, :]
                at = part[None, :].to(tl.int64) * lse_stride + item[:, None]
                found = tl.load(lse + at, mask=there, other=-float("inf"))
                at = part[None, :].to(tl.int64) * part_stride + item[:, None] * head_dim
                at = parts + at[:, :, None] + col[None, None, :]
                values = tl.load(at, mask=there[:, :, None] & real[:, None, :], other=0.0)
                larger = tl.maximum(most, tl.max(found, 1))
                weight = tl.exp(found - _base_of(larger)[:, None])
                shrink = tl.exp(most - _base_of(larger))
                weights = weights * shrink + tl.sum(weight, 1)
                total = total * shrink[:, None] + tl.sum(weight[:, :, None] * values, 1)
                most = larger
            # NaN where the inputs are: only a sum that is exactly 0 has no keys.
            divisor = tl.where(weights == 0, 1.0, weights)
            merged = total / divisor[:, None]
            merged_lse = tl.where(weights == 0, -float("inf"), _base_of(most) + tl.log(divisor))
            for shift in range(1, WORLD + 1):  # every rank begins with another peer
                to = tl.multiple_of(tl.load(data + (me + shift) % WORLD) + half + me * row, 16)
                to = tl.multiple_of(to.to(tl.pointer_type(tl.float32)), 16)
                tl.store(to + item[:, None] * head_dim + col[None, :], merged, mask=inside[:, None] & real)
                tl.store(to + items * head_dim + item, merged_lse, mask=inside)
        tell(flags, me, epoch, 0, WORLD, LANES, MOST)
    if PHASES & 2:
        await_peers(flags, me, epoch, 0, WORLD, LANES, MOST)
        here = tl.load(data + me) + half
        for start in range(first, stop, ITEMS):
            item = start + tl.arange(0, ITEMS)
            inside = item < stop
            most = tl.full((ITEMS,), -float("inf"), dtype=tl.float32)
            weights = tl.zeros((ITEMS,), dtype=tl.float32)
            total = tl.zeros((ITEMS, COLS), dtype=tl.float32)
            for source in tl.static_range(WORLD):
                of = tl.multiple_of((here + source * row).to(tl.pointer_type(tl.float32)), 16)
                found = tl.load(of + items * head_dim + item, mask=inside, other=-float("inf"))
                at = of + item[:, None] * head_dim + col[None, :]
                values = tl.load(at, mask=inside[:, None] & real, other=0.0)
                larger = tl.maximum(most, found)
                weight = tl.exp(found - _base_of(larger))
                shrink = tl.exp(most - _base_of(larger))
                weights = weights * shrink + weight
                total = total * shrink[:, None] + weight[:, None] * values
                most = larger
            divisor = tl.where(weights == 0, 1.0, weights)
            at = item[:, None].to(tl.int64) * head_dim + col[None, :]
            tl.store(out + at, (total / divisor[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & real)
        end_call(state, epoch)


def merge_over_peers(memory: PeerMemory, shares: PackedPartials, out: Tensor, row: int, phases: int = ALL) -> None:
    """See `peer_merge.PeerMerge`.

    Args:
        shares: this rank's, `[splits, B, h, d]`.
        out: `[B, h, d]` contiguous.
        row: bytes from message to message, a multiple of 16.
        phases: PUSH, MERGE: one after the other where ranks are simulated one after the other.
    """
    count, rows, heads, head_dim = shares.out.shape
    items = rows * heads
    per = triton.cdiv(items, memory.blocks)  # whatever the splits: a block waits for the same items of all ranks
    at_once, warps = _SMALL if per * count <= _MOST_SMALL else _LARGE
    world, cols = memory.world, triton.next_power_of_2(head_dim)
    at_once = max(1, at_once * 128 // max(128, cols))  # as many bytes of wider heads, which stay in registers
    parts = min(at_once, triton.next_power_of_2(count))
    _merge_over_peers_kernel[(triton.cdiv(items, per),)](
        shares.out, shares.lse, out, memory.data, memory.flags, memory.state, memory.rank, memory.room, row, count,
        items, per, head_dim, row_strides(shares.out)[0], shares.lse.stride(0), COLS=cols, PARTS=parts,
        ITEMS=at_once // parts, WORLD=world, LANES=triton.next_power_of_2(world), MOST=MOST_BLOCKS, PHASES=phases,
        num_warps=warps,
    )  # fmt: skip
