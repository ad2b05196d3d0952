"""How the blocks of kernels that write each other's memory wait for each other.

A block waits for the same block of the peers only. A flag is the number of the call, which the kernel reads from device
memory and counts up, so that nothing needs resetting and a call can be replayed from a CUDA graph. Data is released and
acquired at system scope.

Calls use the two halves of `peer_memory` in turn. Whoever has ended call k has seen every peer in call k, whose own
call k - 1 has thus ended: nobody reads any more what call k + 1 overwrites.

Blocks spin, so there are never more of them than a GPU holds at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def tell(flags, me, epoch, STEP: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let every rank know that all this block has written is there."""
    lane = tl.arange(0, LANES)
    there = lane < WORLD
    at = tl.load(flags + lane, mask=there, other=0) + ((STEP * MOST + tl.program_id(0)) * WORLD + me) * 8
    tl.debug_barrier()
    tl.atomic_xchg(at.to(tl.pointer_type(tl.int64)), epoch, mask=there, sem="release", scope="sys")


@triton.jit  # type: ignore[untyped-decorator]
def await_peers(flags, me, epoch, STEP: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until this block of every rank has said so."""
    lane = tl.arange(0, LANES)
    there = lane < WORLD
    at = tl.load(flags + me) + ((STEP * MOST + tl.program_id(0)) * WORLD + lane) * 8
    at = at.to(tl.pointer_type(tl.int64))
    seen = tl.load(at, mask=there, other=0, volatile=True)
    while tl.min(tl.where(there, seen, epoch), 0) < epoch:
        seen = tl.load(at, mask=there, other=0, volatile=True)
    # The loads above order nothing; these, which find the same, make what was written before visible to the block.
    tl.atomic_add(at, 0, mask=there, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def end_call(state, epoch):  # type: ignore[no-untyped-def]
    """The last block counts the call."""
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, epoch)
