"""New tokens' queries, keys and values from all ranks of a cache, rotated and stored in one kernel, for few tokens.

Arguments are not checked: call `SharedWeights.rotate_and_store`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lowbit.peer_flags import end_call, signal_peers, wait_for_peers
from ..lowbit.peer_memory import MAX_BLOCKS, PeerMemory
from .rope import Rotation

PUSH, TAKE = 1, 2
ALL = PUSH | TAKE
_HEADS = 16


@triton.jit
def _load(source, step, row, width, element, mask):  # type: ignore[no-untyped-def]
    """Load elements of a row that the ranks hold side by side."""
    at = (element // width).to(tl.int64) * step + row * width + element % width
    return tl.load(source + at, mask=mask, other=0.0)


@triton.jit
def _put(values, q, kv, element, which, queries, mask):  # type: ignore[no-untyped-def]
    """Store heads' elements: of queries behind `q`, of keys and values behind `kv`."""
    is_query = (which < queries)[:, None]
    tl.store(q + element, values.to(q.dtype.element_ty), mask=mask & is_query)
    tl.store(kv + element, values.to(q.dtype.element_ty), mask=mask & (which >= queries)[:, None])


@triton.jit(do_not_specialize=["me", "step"])  # type: ignore[untyped-decorator]
def _rotate_and_store_kernel(  # type: ignore[no-untyped-def]
    x, q, storage, slots, cos, sin, data, flags, state,
    me, half_bytes, step, width, groups, queries, head_dim, half,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, COLS: tl.constexpr,
    ITEM_BYTES: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, MAX: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    """A block handles one token. A message of `step` elements contains `width` columns of every token.

    The columns of all ranks side by side are, for each group, `queries` heads, then a key and a value.
    """
    epoch = tl.load(state) + 1
    offset = (epoch & 1) * half_bytes
    row = tl.program_id(0).to(tl.int64)
    if PHASES & 1:
        col = tl.arange(0, COLS)
        values = tl.load(x + row * width + col, mask=col < width)
        for shift in range(1, WORLD + 1):  # each rank begins with another peer
            to = tl.load(data + (me + shift) % WORLD) + offset + me * step * ITEM_BYTES
            to = tl.multiple_of(tl.multiple_of(to, 16).to(tl.pointer_type(x.dtype.element_ty)), 16)
            tl.store(to + row * width + col, values, mask=col < width)
        signal_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
    if PHASES & 2:
        wait_for_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
        source = tl.multiple_of(tl.load(data + me) + offset, 16).to(tl.pointer_type(x.dtype.element_ty))
        slot = tl.load(slots + row)
        i = tl.arange(0, HALF)
        c = tl.load(cos + row * half + i, mask=i < half, other=0.0)[None, :]
        s = tl.load(sin + row * half + i, mask=i < half, other=0.0)[None, :]
        heads = groups * (queries + 2)
        for start in range(0, heads, HEADS):
            head = start + tl.arange(0, HEADS)
            group, which = head // (queries + 2), head % (queries + 2)
            first = (head * head_dim)[:, None]
            is_value = (which > queries)[:, None]
            to_q = q + (row * (groups * queries) + group * queries + which)[:, None] * head_dim
            to_kv = storage + ((slot * 2 + which - queries) * groups + group)[:, None] * head_dim
            if INTERLEAVED:
                at_a, at_b = 2 * i[None, :], 2 * i[None, :] + 1
            else:
                at_a, at_b = i[None, :], i[None, :] + half
            pairs = (head < heads)[:, None] & (i < half)[None, :]
            a = _load(source, step, row, width, first + at_a, pairs).to(tl.float32)
            b = _load(source, step, row, width, first + at_b, pairs).to(tl.float32)
            _put(tl.where(is_value, a, a * c - b * s), to_q, to_kv, at_a, which, queries, pairs)
            _put(tl.where(is_value, b, b * c + a * s), to_q, to_kv, at_b, which, queries, pairs)
            if REST > 0:
                j = 2 * half + tl.arange(0, REST)[None, :]
                rest = (head < heads)[:, None] & (j < head_dim)
                _put(_load(source, step, row, width, first + j, rest), to_q, to_kv, j, which, queries, rest)
        end_call(state, epoch)


def rotate_and_store(
    memory: PeerMemory,
    x: Tensor,
    q: Tensor,
    storage: Tensor,
    slots: Tensor,
    rotation: Rotation,
    phases: int = ALL,
) -> None:
    """Launch the kernel of `SharedWeights.rotate_and_store`.

    Args:
        x: this rank's columns `[s, 1, w]`. q: `[s, 1, h, d]`, is written. storage: `[slots, 2, 1, g, d]`.
        phases: PUSH, TAKE or both; separate launches allow tests to simulate ranks in one process.
    """
    rows, width = x.shape[0], x.shape[-1]
    groups, head_dim, half = storage.shape[3], storage.shape[4], rotation.cos.shape[-1]
    rest = head_dim - 2 * half
    with torch.cuda.device(x.get_device()):  # a CPU tensor's index, -1, changes nothing
        _rotate_and_store_kernel[(rows,)](
            x, q, storage, slots, rotation.cos, rotation.sin, memory.data, memory.flags, memory.state,
            memory.rank, memory.half_bytes, step_of(x), width, groups, q.shape[2] // groups, head_dim, half,
            INTERLEAVED=rotation.interleaved, HEADS=_HEADS, HALF=triton.next_power_of_2(max(half, 1)),
            REST=triton.next_power_of_2(rest) if rest else 0, COLS=triton.next_power_of_2(width),
            ITEM_BYTES=x.dtype.itemsize, WORLD=memory.world, LANES=triton.next_power_of_2(memory.world), MAX=MAX_BLOCKS,
            PHASES=phases, num_warps=8,
        )  # fmt: skip


def step_of(x: Tensor) -> int:
    """Return the elements of a message, whose bytes are a multiple of 16."""
    return -(-x.numel() // 16) * 16
