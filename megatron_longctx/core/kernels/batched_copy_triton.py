"""The kernel of `batched_copy`.

Every program takes tiles of one copy. Neighbouring programs take different copies, so all peers are read at the same
time.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from . import fused
from .batched_copy import MAX_BASES, Launch

# The number of words, of 8 or 4 bytes, that a program moves at a time.
_TILE = 2048
# The number of programs of a launch: a few per multiprocessor keep enough in flight for links and memory.
_PROGRAMS = 528
_BASES = [f"b{i}" for i in range(MAX_BASES)]


@triton.jit
def _base(i, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15):  # type: ignore[no-untyped-def]
    low = tl.where(i < 2, tl.where(i == 0, b0, b1), tl.where(i == 2, b2, b3))
    mid = tl.where(i < 6, tl.where(i == 4, b4, b5), tl.where(i == 6, b6, b7))
    high = tl.where(i < 10, tl.where(i == 8, b8, b9), tl.where(i == 10, b10, b11))
    top = tl.where(i < 14, tl.where(i == 12, b12, b13), tl.where(i == 14, b14, b15))
    return tl.where(i < 8, tl.where(i < 4, low, mid), tl.where(i < 12, high, top))


@triton.jit(do_not_specialize=_BASES)  # type: ignore[untyped-decorator]
def _copy_kernel(  # type: ignore[no-untyped-def]
    table, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15,
    TILE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    entry = table + tl.program_id(0) * 16
    source = _base(tl.load(entry), b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15)
    into = _base(tl.load(entry + 2), b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15)
    source += tl.load(entry + 1)
    into += tl.load(entry + 3)
    wide = tl.load(entry + 4)
    # Indices have 32 bits, because 64-bit division takes far more instructions; offsets have 64.
    n0, n1, n2 = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    d0, d1, d2 = tl.load(entry + 8), tl.load(entry + 9), tl.load(entry + 10)
    s0, s1, s2 = tl.load(entry + 11), tl.load(entry + 12), tl.load(entry + 13)
    first, step = tl.program_id(1), tl.num_programs(1)
    if wide != 0:
        ROWS: tl.constexpr = TILE // COLS
        of = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        to = tl.multiple_of(into.to(tl.pointer_type(tl.int64)), 16)
        # The strides are multiples of 16 bytes, which the compiler cannot see.
        d0, d1, s0, s1 = d0 // 2, d1 // 2, s0 // 2, s1 // 2
        pieces = (n2 // COLS).to(tl.int32)
        middle = n1.to(tl.int32)
        count = (n0 * n1 * n2 // COLS).to(tl.int32)
        col = tl.arange(0, COLS)
        for tile in range(first, tl.cdiv(count, ROWS), step):
            row = tile * ROWS + tl.arange(0, ROWS)
            piece = row % pieces
            rest = row // pieces
            inner = (rest % middle).to(tl.int64)
            outer = (rest // middle).to(tl.int64)
            at = piece.to(tl.int64) * COLS
            inside = (row < count)[:, None] & (col >= 0)[None, :]
            x = tl.load(of + ((outer * s0 + inner * s1) * 2 + at)[:, None] + col[None, :], mask=inside)
            tl.store(to + ((outer * d0 + inner * d1) * 2 + at)[:, None] + col[None, :], x, mask=inside)
    else:
        of4 = source.to(tl.pointer_type(tl.int32))
        to4 = into.to(tl.pointer_type(tl.int32))
        middle = n1.to(tl.int32)
        last = n2.to(tl.int32)
        count = (n0 * n1 * n2).to(tl.int32)
        for tile in range(first, tl.cdiv(count, TILE), step):
            i = tile * TILE + tl.arange(0, TILE)
            c = (i % last).to(tl.int64)
            rest = i // last
            inner = (rest % middle).to(tl.int64)
            outer = (rest // middle).to(tl.int64)
            y = tl.load(of4 + outer * s0 + inner * s1 + c * s2, mask=i < count)
            tl.store(to4 + outer * d0 + inner * d1 + c * d2, y, mask=i < count)


def copy_triton(launch: Launch, table: Tensor, bases: Sequence[int]) -> None:
    """Make a launch's copies. bases: the addresses of the tensors in `launch.anchors`."""
    count = len(launch.pairs)
    grid = count, min(-(-launch.words // _TILE), -(-_PROGRAMS // count))
    bases = [*bases, *[bases[0]] * (MAX_BASES - len(bases))]
    constants = {"TILE": _TILE, "COLS": launch.columns}
    fused.launch(_copy_kernel, grid, (table, *bases), constants, (), num_warps=8)
