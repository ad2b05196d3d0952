"""Several partial results combined in one pass over memory: outputs merged by their lse, gradients added.

A step-by-step merge reads and writes fp32 accumulators for every partial. Here every partial is read once, sums are
held in registers, and only the result is written.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..plans.recording import MAX_PARTIALS
from .fused import load_fused
from .no_grad import no_grad
from .packed import to_device

_fused = partial(load_fused, __name__, "merging attention")

_MAX_ROWS = 2048
"""The most rows that one program of the fused kernel handles."""


class Partial(NamedTuple):
    """A value `[t, b, g, d]` for rows `start..` and heads `first_head..` of a result `[s, b, h, d]`.

    lse: `[t, b, g]` if the value is an output; None for a gradient.
    """

    start: int
    first_head: int
    value: Tensor
    lse: Tensor | None = None

    @property
    def stop(self) -> int:
        return self.start + self.value.shape[0]

    @property
    def last_head(self) -> int:
        return self.first_head + self.value.shape[2]


@no_grad
def merge_partials(partials: Sequence[Partial], out: Tensor, lse: Tensor) -> None:
    """Write the merge of up to `MAX_PARTIALS` partial outputs, and (0, -inf) where no partial has rows.

    partials: outputs over disjoint sets of keys; 0 wherever their lse is -inf. fp32 or lower, or all fp64.
    out: `[s, b, h, d]`, any strides and float dtype; may be the memory of a partial.
    lse: `[s, b, h]` fp32 (fp64 for fp64 partials), any strides.
    """
    assert len(partials) <= MAX_PARTIALS
    if out.numel() == 0:
        return
    impl = _fused() if _fusable(partials, out) and lse.dtype == torch.float32 else None
    if impl is not None:
        impl.combine_triton(partials, out, lse)
        return
    total = torch.zeros(out.shape, dtype=lse.dtype, device=out.device)
    total_lse = torch.full(lse.shape, -torch.inf, dtype=lse.dtype, device=lse.device)
    for part in partials:
        rows, heads = slice(part.start, part.stop), slice(part.first_head, part.last_head)
        assert part.lse is not None
        _merge_into(total[rows, :, heads], total_lse[rows, :, heads], part.value, part.lse)
    out.copy_(total)
    lse.copy_(total_lse)


@no_grad
def sum_partials(partials: Sequence[Partial], out: Tensor) -> None:
    """Write the sum of up to `MAX_PARTIALS` partials, added in fp32 (fp64 if out is), and 0 where none has rows.

    out: as for `merge_partials`.
    """
    assert len(partials) <= MAX_PARTIALS
    if out.numel() == 0:
        return
    impl = _fused() if _fusable(partials, out) else None
    if impl is not None:
        impl.combine_triton(partials, out, None)
    else:
        _sum_into(partials, out)


def _sum_into(partials: Sequence[Partial], out: Tensor) -> None:
    double = out.dtype == torch.float64 or any(part.value.dtype == torch.float64 for part in partials)
    total = torch.zeros(out.shape, dtype=torch.float64 if double else torch.float32, device=out.device)
    for part in partials:
        total[part.start : part.stop, :, part.first_head : part.last_head] += part.value
    out.copy_(total)


class CopySum:
    """The sum of the gradients of copied rows, as `sum_partials` of any number of partials that follow each other.

    spans: for each partial (first row of the sum, number of rows).
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = spans
        self._table: list[Tensor] = []

    @no_grad
    def __call__(self, copies: Tensor, out: Tensor) -> None:
        """Write the sum of copies `[t, b, g, d]` to out `[s, b, g, d]`, which is contiguous."""
        impl = _fused() if copies.is_cuda and copies.dtype != torch.float64 and copies.numel() else None
        if impl is None:
            parts = torch.split(copies, [tokens for _, tokens in self._spans])
            _sum_into([Partial(start, 0, part) for (start, _), part in zip(self._spans, parts, strict=True)], out)
            return
        self._table = self._table or [to_device(each, out.device) for each in self.table(len(out))]
        impl.sum_copies_triton(copies.contiguous(), *self._table, out)

    def table(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return int32 `[rows + 1]` and `[t]`: where the copies of each row begin in the latter, their numbers."""
        of = torch.cat([torch.arange(start, start + tokens) for start, tokens in self._spans])
        first = torch.zeros(rows + 1, dtype=torch.int32)
        first[1:] = of.bincount(minlength=rows).cumsum(0)
        return first, of.argsort(stable=True).int()


def _merge_into(acc_out: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge one partial into fp32 or fp64 accumulators, in place; (0, -inf) is neutral on both sides.

    With lse l = log of the summed exponentials, the union of (o_a, l_a) and (o_b, l_b) is
    `l = logaddexp(l_a, l_b)`, `o = o_a * sigmoid(l_a - l_b) + o_b * sigmoid(l_b - l_a)`, which cannot overflow.
    """
    new = lse.to(acc_lse.dtype)
    # With an empty partial the difference is -inf, also if the accumulator is empty too (-inf minus -inf is NaN).
    difference = torch.where(new == -torch.inf, -torch.inf, new - acc_lse)
    acc_out.lerp_(out.to(acc_out.dtype), torch.sigmoid(difference).unsqueeze(-1))
    acc_lse.copy_(torch.maximum(acc_lse, new) - logsigmoid(difference.abs()))


def _fusable(partials: Sequence[Partial], out: Tensor) -> bool:
    """Whether the fused kernel supports the tensors. It counts rows in 32 bits, excess ones of the last program too."""
    if out.shape[:3].numel() > 2**31 - _MAX_ROWS:
        return False
    tensors = (out, *(part.value for part in partials))
    return all(x.is_cuda and x.stride(-1) == 1 and x.dtype != torch.float64 for x in tensors)
