"""`rotate` as one fused kernel, which reads and writes every element once, for any number of tokens."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.kernels.fused import launch, row_strides

# The number of heads of one token that one program rotates.
_HEADS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_heads(  # type: ignore[no-untyped-def]
    x, out, first, heads, group, group_stride, head_stride,
    head_dim, half, c, s,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    head = first + tl.arange(0, HEADS)
    there = head < heads
    of_group = (head // group).to(tl.int64) * group_stride
    source = x + (of_group + (head % group).to(tl.int64) * head_stride)[:, None]
    target = out + (head * head_dim)[:, None]
    i = tl.arange(0, HALF)[None, :]
    pairs = there[:, None] & (i < half)
    if INTERLEAVED:
        at_a, at_b = 2 * i, 2 * i + 1
    else:
        at_a, at_b = i, i + half
    a = tl.load(source + at_a, mask=pairs, other=0.0).to(tl.float32)
    b = tl.load(source + at_b, mask=pairs, other=0.0).to(tl.float32)
    tl.store(target + at_a, a * c - b * s, mask=pairs)
    tl.store(target + at_b, b * c + a * s, mask=pairs)
    if REST > 0:
        j = 2 * half + tl.arange(0, REST)[None, :]
        rest = there[:, None] & (j < head_dim)
        tl.store(target + j, tl.load(source + j, mask=rest, other=0.0), mask=rest)


# The batch has no specialized variants: it need not be a multiple of 16 for vector loads.
@triton.jit(do_not_specialize=["batch"])  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x, x_out, x_heads, x_group, x_s, x_b, x_g, x_h,
    y, y_out, y_heads, y_group, y_s, y_b, y_g, y_h,
    cos, sin, batch, head_dim, half,
    z, z_s, z_h, slots, slot_stride,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    STORE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """STORE: y and a copy of z go to a slot for every token, to the one of its row or of `slots` (2)."""
    # 64-bit, because a million tokens of many heads exceed 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(0) // batch).to(tl.int64)
    b = row - token * batch
    i = tl.arange(0, HALF)
    c = tl.load(cos + token * half + i, mask=i < half, other=0.0)[None, :]
    s = tl.load(sin + token * half + i, mask=i < half, other=0.0)[None, :]
    if INVERSE:
        s = -s
    first = tl.program_id(1) * HEADS
    of_x = tl.cdiv(x_heads, HEADS) * HEADS
    if first < of_x:
        _rotate_heads(
            x + token * x_s + b * x_b, x_out + row * x_heads * head_dim, first, x_heads, x_group, x_g, x_h,
            head_dim, half, c, s, INTERLEAVED, HEADS, HALF, REST,
        )  # fmt: skip
    elif STORE == 0:
        _rotate_heads(
            y + token * y_s + b * y_b, y_out + row * y_heads * head_dim, first - of_x, y_heads, y_group, y_g, y_h,
            head_dim, half, c, s, INTERLEAVED, HEADS, HALF, REST,
        )  # fmt: skip
    else:
        slot = row
        if STORE == 2:
            slot = tl.load(slots + row)
        to = y_out + slot * slot_stride
        of_y = of_x + tl.cdiv(y_heads, HEADS) * HEADS
        if first < of_y:
            _rotate_heads(
                y + token * y_s, to, first - of_x, y_heads, y_group, y_g, y_h,
                head_dim, half, c, s, INTERLEAVED, HEADS, HALF, REST,
            )  # fmt: skip
        else:
            _rotate_heads(
                z + token * z_s, to + y_heads * head_dim, first - of_y, y_heads, 1, z_h, 0,
                head_dim, 0, c, s, INTERLEAVED, HEADS, HALF, COLS,
            )  # fmt: skip


def rotate_triton(
    tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> list[Tensor]:
    """Run `rotate` on fp32, bf16 or fp16 tensors with adjacent elements of a head, without checks."""
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
    _launch(tensors, outs, cos, sin, interleaved, inverse, [outs[0], 0, 0, outs[0], 0])
    return outs


def rotate_into(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rows: Tensor, slots: Tensor | None
) -> Tensor:
    """Run `Rotation.rotate_into` without checks. slots: int64 `[s]`; None for the first s of the rows."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _, token, _, head, _ = _strides(v)
    stored: list[Tensor | int] = [v, token, head, rows if slots is None else slots, rows.stride(0)]
    _launch((q, k), (out, rows), cos, sin, interleaved, False, stored, 1 if slots is None else 2)
    return out


def _launch(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool,
    stored: Sequence[Tensor | int], store: int = 0,
) -> None:  # fmt: skip
    x, y = tensors[0], tensors[-1]
    heads = [each.shape[2] if each.ndim == 4 else each.shape[2] * each.shape[3] for each in tensors]
    head_dim, half, batch = x.shape[-1], cos.shape[-1], x.shape[1]
    per_program = min(_HEADS, triton.next_power_of_2(max(heads)))
    blocks = sum(triton.cdiv(count, per_program) for count in (*heads, *heads[1:] * bool(store)))
    rest = head_dim - 2 * half
    arguments: list[Tensor | int] = [x, outs[0], heads[0], *_strides(x), y, outs[-1], heads[-1], *_strides(y)]
    arguments += [cos, sin, batch, head_dim, half, *stored]
    constants = {"INVERSE": inverse, "INTERLEAVED": interleaved, "HEADS": per_program}
    constants |= {"HALF": triton.next_power_of_2(max(half, 1)), "REST": triton.next_power_of_2(rest) if rest else 0}
    constants |= {"STORE": store, "COLS": triton.next_power_of_2(head_dim) if store else 0}
    launch(_rotate_kernel, (x.shape[0] * batch, blocks), arguments, constants)


def _strides(x: Tensor) -> tuple[int, int, int, int, int]:
    """Return the heads of a group, and the strides of tokens, batch, groups and heads within a group."""
    if x.ndim == 4:
        s, b, h = row_strides(x)
        return 1, s, b, h, 0
    s, b, g, h = row_strides(x)
    return x.shape[3], s, b, g, h
