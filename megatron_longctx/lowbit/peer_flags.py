"""Kernels over peer memory: how their thread blocks wait for other ranks.

A block waits only for the same block of the peers. A flag holds the number of the call, which the kernel reads from
device memory and increments. So nothing needs to be reset, and CUDA graphs can replay calls. Data is released and
acquired at system scope.

Calls alternate between the two halves of `PeerMemory`. A rank that has ended call k has seen every peer in call k, so
their calls k - 1 have ended, and nobody still reads what call k + 1 overwrites.

Blocks spin, so there are never more of them than a GPU runs at once. Arguments are not checked.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def signal_peers(flags, me, epoch, STEP: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tell every rank that everything this block has written is complete."""
    lane = tl.arange(0, LANES)
    valid = lane < WORLD
    at = tl.load(flags + lane, mask=valid, other=0) + ((STEP * MAX + tl.program_id(0)) * WORLD + me) * 8
    tl.debug_barrier()
    tl.atomic_xchg(at.to(tl.pointer_type(tl.int64)), epoch, mask=valid, sem="release", scope="sys")


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_peers(flags, me, epoch, STEP: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the same block of every rank has called `signal_peers`."""
    lane = tl.arange(0, LANES)
    valid = lane < WORLD
    at = tl.load(flags + me) + ((STEP * MAX + tl.program_id(0)) * WORLD + lane) * 8
    at = at.to(tl.pointer_type(tl.int64))
    seen = tl.load(at, mask=valid, other=0, volatile=True)
    while tl.min(tl.where(valid, seen, epoch), 0) < epoch:
        seen = tl.load(at, mask=valid, other=0, volatile=True)
    # The loads above order nothing. These find the same values, and make the data written before visible to the block.
    tl.atomic_add(at, 0, mask=valid, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def end_call(state, epoch):  # type: ignore[no-untyped-def]
    """Count the call in its last block."""
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, epoch)
