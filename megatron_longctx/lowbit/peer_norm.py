"""A sum over the ranks of a host, its addition to the residual and the RMS norm of that, in one kernel for few tokens.

Each is so small that a kernel of its own takes longer to start than to run. Arguments are not checked: call
`PeerReduction.add_and_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .peer_flags import end_call, signal_peers, wait_for_peers
from .peer_memory import MAX_BLOCKS, PeerMemory

PUSH, SUM = 1, 2
ALL = PUSH | SUM


@triton.jit(do_not_specialize=["me", "message"])  # type: ignore[untyped-decorator]
def _add_and_norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, data, flags, state, me, half_bytes, message, width, eps,
    CENTERED: tl.constexpr, COLS: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr, MAX: tl.constexpr,
    PHASES: tl.constexpr,
):  # fmt: skip
    """A block handles one row of `width`, and a message of `message` bytes contains a rank's rows of x."""
    epoch = tl.load(state) + 1
    half = (epoch & 1) * half_bytes
    col = tl.arange(0, COLS)
    inside = col < width
    at = tl.program_id(0).to(tl.int64) * width + col
    if PHASES & 1:
        values = tl.load(x + at, mask=inside)
        for shift in range(1, WORLD + 1):  # each rank begins with another peer
            to = tl.multiple_of(tl.load(data + (me + shift) % WORLD) + half + me * message, 16)
            tl.store(tl.multiple_of(to.to(tl.pointer_type(x.dtype.element_ty)), 16) + at, values, mask=inside)
        signal_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
    if PHASES & 2:
        wait_for_peers(flags, me, epoch, 0, WORLD, LANES, MAX)
        here = tl.load(data + me) + half
        total = tl.zeros((COLS,), tl.float32)
        for source in tl.static_range(WORLD):
            of = tl.multiple_of(here + source * message, 16).to(tl.pointer_type(x.dtype.element_ty))
            total += tl.load(tl.multiple_of(of, 16) + at, mask=inside, other=0.0).to(tl.float32)
        # The sum is rounded, and so is its sum with the residual, as by separate kernels.
        total = total.to(x.dtype.element_ty).to(tl.float32)
        added = (total + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(residual + at, added, mask=inside)
        wide = added.to(tl.float32)
        scale = 1 / tl.sqrt(tl.sum(wide * wide) / width + eps)
        factor = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
        if CENTERED:
            factor += 1
        tl.store(out + at, (wide * scale * factor).to(out.dtype.element_ty), mask=inside)
        end_call(state, epoch)


def add_and_norm(
    memory: PeerMemory,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    centered: bool,
    phases: int = ALL,
) -> None:
    """Launch the kernel of `PeerReduction.add_and_norm`; out: of x's shape.

    Args:
        phases: PUSH, SUM or both; separate launches allow tests to simulate ranks in one process.
    """
    width = x.shape[-1]
    rows, cols = x.numel() // width, triton.next_power_of_2(width)
    with torch.cuda.device(x.get_device()):  # a CPU tensor's index, -1, changes nothing
        _add_and_norm_kernel[(rows,)](
            x, residual, weight, out, memory.data, memory.flags, memory.state, memory.rank, memory.half_bytes,
            message_bytes(x), width, eps, CENTERED=centered, COLS=cols, WORLD=memory.world,
            LANES=triton.next_power_of_2(memory.world), MAX=MAX_BLOCKS, PHASES=phases,
            num_warps=max(4, min(16, cols // 256)),
        )  # fmt: skip


def message_bytes(x: Tensor) -> int:
    """Return the bytes of a rank's rows."""
    return -(-x.numel() * x.dtype.itemsize // 16) * 16
