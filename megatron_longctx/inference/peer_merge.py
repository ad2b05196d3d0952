"""The merge of the partial results of several ranks of one host, in one kernel over peer memory. It imports triton."""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from ..core.kernels.fused import row_strides
from ..lowbit.peer_flags import end_call, signal_peers, wait_for_peers
from ..lowbit.peer_memory import MAX_BLOCKS, PeerMemory, allocate_peer_memory
from .paged import PackedPartials

PUSH, MERGE = 1, 2
ALL = PUSH | MERGE
_SMALL, _LARGE = (16, 4), (128, 16)
"""The partial results, of one or several items, that a block loads at once, and its warps: for decode and for prompts
(docs/decisions.md)."""
_MAX_SMALL = 128
"""The most partial results per block for which `_SMALL` is used."""


class PeerMerge:
    """Merges the partial results of the ranks of one host over disjoint keys, in one kernel.

    Every rank gets all heads, with the same bits, or its own part of them.

    It replaces an all-gather between two merges. All ranks make the same calls with the same shapes, in one order on
    the device. Calls can be captured in a CUDA graph after the same call has been made once, which compiles the kernel.
    """

    def __init__(self, memory: PeerMemory, parts: int = 1) -> None:
        self._memory, self._parts = memory, parts

    @staticmethod
    def of(
        group: dist.ProcessGroup, device: torch.device, rows: int, heads: int, head_dim: int, parts: int = 1
    ) -> PeerMerge:
        """Allocate memory for the results of up to `rows` queries. Collective; see `allocate_peer_memory`.

        Args:
            heads: that every rank gets.
            parts: the number of ranks if they get different heads, 1 if all of them get all heads.

        Raises:
            PeerMemoryError: symmetric memory cannot be used; raised by all ranks alike.
        """
        half_bytes = dist.get_world_size(group) * _message_bytes(rows, heads, head_dim)
        return PeerMerge(
            allocate_peer_memory(group, device, half_bytes, "Leave more of the device's memory free."), parts
        )

    def compile(self, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile the kernel for decode: for few and many splits, and for counts that are multiples of 16 or not."""
        for rows, splits in product((1, 16), (1 << i for i in range(8))):
            out = torch.empty(rows, heads, head_dim, dtype=dtype, device=device)
            partials = PackedPartials.empty(out.repeat(1, self._parts, 1), (splits,))
            partials.flat.zero_()
            self(partials, out)

    def fits(self, rows: int, heads: int, head_dim: int) -> bool:
        """Whether the memory has room for the results of `rows` queries."""
        return self._memory.world * _message_bytes(rows, heads, head_dim) <= self._memory.half_bytes

    def __call__(self, partials: PackedPartials, out: Tensor) -> Tensor:
        """Merge this rank's partial results, then the merged results of all ranks in the order of ranks.

        Args:
            partials: this rank's `[splits, B, parts * h, d]` and `[splits, B, parts * h]` fp32; `splits` may differ
                between ranks.
            out: `[B, h, d]` contiguous, any float dtype: is written and returned. 0 where no rank has keys.
        """
        rows, heads, head_dim = out.shape
        with torch.no_grad(), torch.cuda.device(out.get_device()):  # a CPU tensor's index, -1, changes nothing
            merge_over_peers(self._memory, partials, out, _message_bytes(rows, heads, head_dim))
        return out


def _message_bytes(rows: int, heads: int, head_dim: int) -> int:
    return -(-rows * heads * (head_dim + 1) * 4 // 16) * 16


@triton.jit
def _exponent_base(largest):  # type: ignore[no-untyped-def]
    """Replace -inf, the maximum of nothing, because -inf minus -inf would be NaN."""
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_splits(  # type: ignore[no-untyped-def]
    partials, lse, item, inside, col, count, head_dim, partial_stride, lse_stride,
    COLS: tl.constexpr, PARTS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Return the values `[ITEMS, COLS]` and the lse `[ITEMS]` of items over all splits of this rank's keys."""
    largest = tl.full((ITEMS,), -float("inf"), dtype=tl.float32)
    weights = tl.zeros((ITEMS,), dtype=tl.float32)
    total = tl.zeros((ITEMS, COLS), dtype=tl.float32)
    for begin in range(0, count, PARTS):
        part = begin + tl.arange(0, PARTS)
        valid = inside[:, None] & (part < count)[None, :]
        at = part[None, :].to(tl.int64) * lse_stride + item[:, None]
        part_lse = tl.load(lse + at, mask=valid, other=-float("inf"))
        at = part[None, :].to(tl.int64) * partial_stride + item[:, None] * head_dim
        at = partials + at[:, :, None] + col[None, None, :]
        values = tl.load(at, mask=valid[:, :, None] & (col < head_dim)[None, None, :], other=0.0)
        larger = tl.maximum(largest, tl.max(part_lse, 1))
        weight = tl.exp(part_lse - _exponent_base(larger)[:, None])
        shrink = tl.exp(largest - _exponent_base(larger))
        weights = weights * shrink + tl.sum(weight, 1)
        total = total * shrink[:, None] + tl.sum(weight[:, :, None] * values, 1)
        largest = larger
    # NaN if the inputs are: only a sum that is exactly 0 has no keys.
    divisor = tl.where(weights == 0, 1.0, weights)
    merged_lse = tl.where(weights == 0, -float("inf"), _exponent_base(largest) + tl.log(divisor))
    return total / divisor[:, None], merged_lse


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["me", "row", "count", "items", "per", "heads", "lse_stride"],
    do_not_specialize_on_alignment=["lse"],
)
def _merge_over_peers_kernel(  # type: ignore[no-untyped-def]
    partials, lse, out, data, flags, state,
    me, half_bytes, row, count, items, per, heads, head_dim, partial_stride, lse_stride,
    COLS: tl.constexpr, PARTS: tl.constexpr, ITEMS: tl.constexpr, DIVIDED: tl.constexpr,
    WORLD: tl.constexpr, LANES: tl.constexpr, MAX: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    """An item is one of the `heads` that a rank gets, of a query. A message contains the values of all items, `[items,
    head_dim]` fp32, and then their lse. Each block handles `per` items.

    If DIVIDED, a query has WORLD times as many heads, and each rank gets its part of them.
    """
    epoch = tl.load(state) + 1
    half = (epoch & 1) * half_bytes
    first = tl.program_id(0) * per
    stop = tl.minimum(first + per, items)
    col = tl.arange(0, COLS)
    in_head = (col < head_dim)[None, :]
    if PHASES & 1:
        for start in range(first, stop, ITEMS):
            item = start + tl.arange(0, ITEMS)
            inside = item < stop
            if not DIVIDED:
                merged, merged_lse = _merge_splits(
                    partials, lse, item, inside, col, count, head_dim, partial_stride, lse_stride, COLS, PARTS, ITEMS
                )
            for shift in range(1, WORLD + 1):  # each rank begins with another peer
                peer = (me + shift) % WORLD
                if DIVIDED:
                    of_peer = (item // heads * WORLD + peer) * heads + item % heads
                    merged, merged_lse = _merge_splits(
                        partials, lse, of_peer, inside, col, count, head_dim, partial_stride, lse_stride,
                        COLS, PARTS, ITEMS,
                    )  # fmt: skip
                to = tl.multiple_of(tl.load(data + peer) + half + me * row, 16)
                to = tl.multiple_of(to.to(tl.pointer_type(tl.float32)), 16)
                tl.store(to + item[:, None] * head_dim + col[None, :], merged, mask=inside[:, None] & in_head)
                tl.store(to + items * head_dim + item, merged_lse, mask=inside)
        signal_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
    if PHASES & 2:
        wait_for_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
        here = tl.load(data + me) + half
        for start in range(first, stop, ITEMS):
            item = start + tl.arange(0, ITEMS)
            inside = item < stop
            largest = tl.full((ITEMS,), -float("inf"), dtype=tl.float32)
            weights = tl.zeros((ITEMS,), dtype=tl.float32)
            total = tl.zeros((ITEMS, COLS), dtype=tl.float32)
            for source in tl.static_range(WORLD):
                of = tl.multiple_of((here + source * row).to(tl.pointer_type(tl.float32)), 16)
                rank_lse = tl.load(of + items * head_dim + item, mask=inside, other=-float("inf"))
                at = of + item[:, None] * head_dim + col[None, :]
                values = tl.load(at, mask=inside[:, None] & in_head, other=0.0)
                larger = tl.maximum(largest, rank_lse)
                weight = tl.exp(rank_lse - _exponent_base(larger))
                shrink = tl.exp(largest - _exponent_base(larger))
                weights = weights * shrink + weight
                total = total * shrink[:, None] + weight[:, None] * values
                largest = larger
            divisor = tl.where(weights == 0, 1.0, weights)
            at = item[:, None].to(tl.int64) * head_dim + col[None, :]
            tl.store(out + at, (total / divisor[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & in_head)
        end_call(state, epoch)


def merge_over_peers(memory: PeerMemory, partials: PackedPartials, out: Tensor, row: int, phases: int = ALL) -> None:
    """Launch the kernel of `PeerMerge`, whose blocks wait as `lowbit.peer_flags` says. Arguments are not checked.

    Args:
        partials: this rank's, `[splits, B, h, d]`, or with the heads of all ranks, of which each gets its part.
        out: `[B, h, d]` contiguous.
        row: the bytes from message to message, a multiple of 16.
        phases: PUSH, MERGE or both; separate launches allow tests to simulate ranks in one process.
    """
    count = len(partials.out)
    rows, heads, head_dim = out.shape
    items, divided = rows * heads, partials.out.shape[2] > heads
    per = triton.cdiv(items, memory.blocks)  # independent of `splits`: a block waits for the same items of all ranks
    at_once, warps = _SMALL if per * count <= _MAX_SMALL else _LARGE
    world, cols = memory.world, triton.next_power_of_2(head_dim)
    at_once = max(1, at_once * 128 // max(128, cols))  # fewer if heads are wider, so that they stay in registers
    parts = min(at_once, triton.next_power_of_2(count))
    _merge_over_peers_kernel[(triton.cdiv(items, per),)](
        partials.out, partials.lse, out, memory.data, memory.flags, memory.state, memory.rank, memory.half_bytes, row,
        count, items, per, heads, head_dim, row_strides(partials.out)[0], partials.lse.stride(0),
        COLS=cols, PARTS=parts, ITEMS=at_once // parts, DIVIDED=divided, WORLD=world,
        LANES=triton.next_power_of_2(world), MAX=MAX_BLOCKS, PHASES=phases, num_warps=warps,
    )  # fmt: skip
