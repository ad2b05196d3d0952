"""The sum over ranks, the residual and the RMSNorm between two parts of a layer, in one kernel.

For few tokens, each of these operations alone takes as long as a kernel's start. A block handles whole rows, and waits
for the same block of the peers (see `lowbit.peer_flags`). Arguments are not checked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.kernels.fused import launch
from .peer_flags import end_call, signal_peers, wait_for_peers
from .peer_memory import MAX_BLOCKS, PeerMemory

PUSH, SUM = 1, 2
ALL = PUSH | SUM
_LOCAL_BLOCKS = 1024


@triton.jit(do_not_specialize=["me", "rows", "per", "message"])  # type: ignore[untyped-decorator]
def _sum_norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, normed, eps, data, flags, state, me, half_bytes, rows, per, message, width,
    COLS: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, MAX: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * per
    stop = tl.minimum(first + per, rows)
    col = tl.arange(0, COLS)
    inside = col < width
    if WORLD > 1:
        epoch = tl.load(state) + 1
        half = (epoch & 1) * half_bytes
        if PHASES & 1:
            for row in range(first, stop):
                at = (tl.zeros([COLS], tl.int64) + row) * width + col
                value = tl.load(x + at, mask=inside, other=0.0)
                for shift in range(1, WORLD + 1):  # each rank begins with another peer
                    to = tl.load(data + (me + shift) % WORLD) + half + me * message
                    to = tl.multiple_of(to.to(tl.pointer_type(x.dtype.element_ty)), 16)
                    tl.store(to + at, value, mask=inside)
            signal_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
    if PHASES & 2:
        scale = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
        if WORLD > 1:
            wait_for_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
        for row in range(first, stop):
            at = (tl.zeros([COLS], tl.int64) + row) * width + col
            if WORLD > 1:
                total = tl.zeros([COLS], tl.float32)
                here = tl.load(data + me) + half
                for source in tl.static_range(WORLD):
                    of = tl.multiple_of((here + source * message).to(tl.pointer_type(x.dtype.element_ty)), 16)
                    total += tl.load(of + at, mask=inside, other=0.0).to(tl.float32)
                # Rounded wherever separate operations round.
                total = total.to(x.dtype.element_ty).to(tl.float32)
            else:
                total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            hidden = total + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            rounded = hidden.to(x.dtype.element_ty)
            tl.store(x + at, rounded, mask=inside)
            hidden = rounded.to(tl.float32)
            mean = tl.sum(hidden * hidden, 0) / width
            tl.store(normed + at, (hidden * tl.rsqrt(mean + eps) * scale).to(x.dtype.element_ty), mask=inside)
        if WORLD > 1:
            end_call(state, epoch)


def sum_norm(
    memory: PeerMemory | None, x: Tensor, residual: Tensor, weight: Tensor, eps: float, phases: int = ALL
) -> Tensor:
    """Add to `residual` the sum of all ranks' `x`, write it into `x`, and return its RMSNorm.

    Args:
        memory: with room for two messages as large as x on every rank; None for x of this rank alone.
        x, residual: `[..., h]` contiguous, of one dtype (fp32, bf16 or fp16). weight: `[h]`, of this dtype too.
        phases: PUSH, SUM or both; separate launches allow tests to simulate ranks in one process.
    """
    width, normed = x.shape[-1], torch.empty_like(x)
    rows = x.numel() // width
    most, world = (_LOCAL_BLOCKS, 1) if memory is None else (memory.blocks, memory.world)
    per = triton.cdiv(rows, most)
    cols = triton.next_power_of_2(width)
    peers: list[Tensor | float] = [x, x, x, 0, 0]  # not read
    if memory is not None:
        peers = [memory.data, memory.flags, memory.state, memory.rank, memory.half_bytes]
    message = triton.cdiv(x.numel() * x.itemsize, 16) * 16
    constants = {"COLS": cols, "WORLD": world, "LANES": triton.next_power_of_2(world), "MAX": MAX_BLOCKS}
    launch(
        _sum_norm_kernel,
        (triton.cdiv(rows, per),),
        [x, residual, weight, normed, eps, *peers, rows, per, message, width],
        constants | {"PHASES": phases},
        num_warps=max(1, min(16, cols // 512)),
    )
    return normed
