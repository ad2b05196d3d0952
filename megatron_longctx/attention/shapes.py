"""What the rows of every kind look like in one kind of pass."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.interface import sum_dtype
from ..schedules import Heads, Kind, Workload
from ..schedules.plan import FIELDS
from ..schedules.program import Rows
from .kv_format import KVFormat, Like


class Shapes(NamedTuple):
    """Of passes over `batch` sequences of a workload's heads. kv: keys and values as they travel; gradients travel as
    `kv_grad` says."""

    workload: Workload
    dtype: torch.dtype
    device: torch.device
    kv: KVFormat
    kv_grad: KVFormat

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of what is added up, and of log-sum-exps."""
        return sum_dtype(self.dtype)

    def heads(self, kind: Kind, part: Heads) -> range:
        """Where a part of the heads lies among all heads of a kind."""
        return self.workload.head_range(kind, part)

    def like(self, kind: Kind, tokens: int, heads: Heads) -> tuple[Like, ...]:
        """So many rows of a part of the heads, as they travel, by field."""
        return _likes(self, kind, tokens, heads)

    def parts(self, kind: Kind, tokens: int, heads: Heads, dtype: torch.dtype) -> tuple[Like, ...]:
        """Results as they are computed: (out, lse), (dq) or (dk, dv)."""
        work, count = self.workload, len(self.heads(kind, heads))
        sizes = (work.head_dim, work.value_dim) if kind is Kind.DKV else (work.head_dim,)
        if kind is Kind.OUT:
            lse = Like((tokens, work.batch, count), self.sum_dtype, self.device)
            return Like((tokens, work.batch, count, work.value_dim), dtype, self.device), lse
        return tuple(Like((tokens, work.batch, count, size), dtype, self.device) for size in sizes)

    def cut(self, field: Tensor, rows: Rows) -> Tensor:
        """The rows and heads of one of the fields that lie there."""
        if rows.heads != rows.held:
            wanted, first = self.heads(rows.kind, rows.heads), self.heads(rows.kind, rows.held).start
            dim = 2 if field.ndim == 3 else field.ndim - 2  # an lse [t, b, h] has none after its heads
            field = field.narrow(dim, wanted.start - first, len(wanted))
        return field if rows.tokens == field.shape[0] else field.narrow(0, rows.start, rows.tokens)


@lru_cache(maxsize=1024)
def _likes(shapes: Shapes, kind: Kind, tokens: int, heads: Heads) -> tuple[Like, ...]:
    work, device = shapes.workload, shapes.device
    rows = tokens, work.batch, len(shapes.heads(kind, heads))
    if kind in (Kind.KV, Kind.DKV):
        return ((shapes.kv if kind is Kind.KV else shapes.kv_grad).like(*rows, device),)
    of_field = {
        "q": Like((*rows, work.head_dim), shapes.dtype, device),
        "out": Like((*rows, work.value_dim), shapes.dtype, device),
        "lse": Like(rows, shapes.sum_dtype, device),
    }
    return tuple(of_field[field] for field in FIELDS[kind])


def new_lse(like: Like) -> Tensor:
    """An lse `[s, b, h]` with heads before tokens in memory: the order in which kernels want it."""
    s, b, h = like.shape
    return torch.empty((b, h, s), dtype=like.dtype, device=like.device).permute(2, 0, 1)
