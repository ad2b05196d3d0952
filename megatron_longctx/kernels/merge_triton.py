"""`merge_into` as one fused kernel: reads both partials once, writes the accumulators once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_longctx.kernels.strides import row_strides

# Elements of the out tensors that one program handles.
_TILE = 2048
# What kernels are not compiled anew for, as it changes with length and batch: numbers that no vector load needs to be
# multiples of 16, and where the lse lie, which are read one by one.
_ANY = ["num_rows", "batch", "heads", "acc_lse_s", "acc_lse_b", "acc_lse_h", "lse_s", "lse_b", "lse_h"]
_ANYWHERE = ["acc_lse", "lse"]


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=_ANYWHERE)  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    acc_out,
    acc_lse,
    out,
    lse,
    num_rows,
    batch,
    heads,
    head_dim,
    acc_out_s,
    acc_out_b,
    acc_out_h,
    acc_lse_s,
    acc_lse_b,
    acc_lse_h,
    out_s,
    out_b,
    out_h,
    lse_s,
    lse_b,
    lse_h,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    # A row is one head of one token. Counted in 32 bits, since dividing 64 takes far more instructions; places
    # take 64, because a million tokens of many heads pass 2**31 elements.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    h = (row % heads).to(tl.int64)
    token = row // heads
    b = (token % batch).to(tl.int64)
    s = (token // batch).to(tl.int64)
    col = tl.arange(0, COLS)
    tile_inside = inside[:, None] & (col < head_dim)[None, :]

    acc_lse_at = acc_lse + s * acc_lse_s + b * acc_lse_b + h * acc_lse_h
    l_acc = tl.load(acc_lse_at, mask=inside, other=0.0)
    l_new = tl.load(lse + s * lse_s + b * lse_b + h * lse_h, mask=inside, other=0.0)

    # An empty partial has difference -inf, also beside an empty accumulator (-inf minus -inf is NaN).
    difference = tl.where(l_new == -float("inf"), -float("inf"), l_new - l_acc)
    # Both weights from the exponential of a number <= 0: no overflow, and full precision near 0 and 1.
    small = tl.exp(-tl.abs(difference))
    larger = 1.0 / (1.0 + small)
    smaller = small / (1.0 + small)
    new_wins = difference > 0
    weight_new = tl.where(new_wins, larger, smaller)
    weight_acc = tl.where(new_wins, smaller, larger)

    acc_at = acc_out + (s * acc_out_s + b * acc_out_b + h * acc_out_h)[:, None] + col[None, :]
    out_at = out + (s * out_s + b * out_b + h * out_h)[:, None] + col[None, :]
    o_acc = tl.load(acc_at, mask=tile_inside, other=0.0)
    o_new = tl.load(out_at, mask=tile_inside, other=0.0).to(tl.float32)
    merged_out = o_acc * weight_acc[:, None] + o_new * weight_new[:, None]
    merged_lse = tl.maximum(l_acc, l_new) + tl.log(1.0 + small)

    # Every warp loads the few lse values for itself: without the barrier a fast warp overwrites what a slow one has yet
    # to read (seen on an H100 at a variant's first launch: three wrong rows in twelve thousand).
    tl.debug_barrier()
    tl.store(acc_at, merged_out, mask=tile_inside)
    tl.store(acc_lse_at, merged_lse, mask=inside)


def merge_into_triton(acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """`merge_into` for fp32 accumulators and lse, and fp32, bf16 or fp16 `out`; head dims side by side.

    Arguments are not checked: call `merge_into`.
    """
    s, batch, heads, head_dim = acc_out.shape
    num_rows = s * batch * heads
    cols = triton.next_power_of_2(head_dim)
    rows = max(1, _TILE // cols)
    strides = (*row_strides(acc_out), *acc_lse.stride(), *row_strides(out), *lse.stride())
    # The launch goes to the current device, which need not be the tensors'. A CPU tensor's index, -1, changes nothing.
    with torch.cuda.device(acc_out.get_device()):
        _merge_kernel[(triton.cdiv(num_rows, rows),)](
            acc_out, acc_lse, out, lse, num_rows, batch, heads, head_dim, *strides, ROWS=rows, COLS=cols
        )
