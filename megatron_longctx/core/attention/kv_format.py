"""The shapes and dtypes of rows, and the formats in which keys and values are stored, sent and given to a kernel.

The rows of a format are one tensor, token first and heads before the last dimension, so that both can be cut.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..kernels.batched_copy import Pair
from ..kernels.interface import sum_dtype
from ..plans import Heads, Kind, Workload
from ..plans.plan import FIELDS


class TensorSpec(NamedTuple):
    """A tensor's shape, dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return a contiguous, uninitialized tensor of this shape."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class KVFormat(ABC):
    """A way to store and send keys `[t, b, g, d]` and values `[t, b, g, e]`."""

    splits_into_views: ClassVar[bool] = False
    """Whether `split` returns parts of the rows, which change with them."""

    @property
    def row_bytes(self) -> int:
        """The bytes of one token and head."""
        return self.spec(1, 1, 1, torch.device("cpu")).num_bytes

    @abstractmethod
    def spec(self, tokens: int, batch: int, heads: int, device: torch.device) -> TensorSpec:
        """Return shape and dtype of the rows of `tokens` tokens."""

    @abstractmethod
    def pairs(self, into: Tensor, k: Tensor, v: Tensor) -> list[Pair]:
        """Return the copies (into, source) that store keys and values in rows; do what copies cannot do."""

    @abstractmethod
    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of rows, for the kernel."""


MakeFormat = Callable[[int, int, torch.dtype], KVFormat]
"""Makes a format from the head dims of keys and values and their dtype; may be the format's class."""


def plain_kv(head_dim: int, value_dim: int, dtype: torch.dtype) -> KVFormat:
    """Return the format of unconverted keys and values."""
    return StackedKV(head_dim, dtype) if head_dim == value_dim else JoinedKV(head_dim, value_dim, dtype)


@dataclass(frozen=True)
class StackedKV(KVFormat):
    """Keys `[t, 0]` and values `[t, 1]` of `[t, 2, b, g, d]`, for equal head dims."""

    splits_into_views = True
    head_dim: int
    dtype: torch.dtype

    def spec(self, tokens: int, batch: int, heads: int, device: torch.device) -> TensorSpec:
        return TensorSpec((tokens, 2, batch, heads, self.head_dim), self.dtype, device)

    def pairs(self, into: Tensor, k: Tensor, v: Tensor) -> list[Pair]:
        return [(into[:, 0], k), (into[:, 1], v)]

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        k, v = rows.unbind(1)
        return k, v


@dataclass(frozen=True)
class JoinedKV(KVFormat):
    """A head's key followed by its value, for any two head dims."""

    splits_into_views = True
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    def spec(self, tokens: int, batch: int, heads: int, device: torch.device) -> TensorSpec:
        return TensorSpec((tokens, batch, heads, self.head_dim + self.value_dim), self.dtype, device)

    def pairs(self, into: Tensor, k: Tensor, v: Tensor) -> list[Pair]:
        keys, values = self.split(into)
        return [(keys, k), (values, v)]

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[..., : self.head_dim], rows[..., self.head_dim :]


Fields = tuple[Tensor, ...]
"""The tensors of one kind of rows, all token first."""


class Shapes(NamedTuple):
    """The shapes and dtypes of all rows in passes over one workload.

    kv: the format in which keys and values are stored and sent. kv_grad: the format of their gradients.
    """

    workload: Workload
    dtype: torch.dtype
    device: torch.device
    kv: KVFormat
    kv_grad: KVFormat

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of sums and of log-sum-exps."""
        return sum_dtype(self.dtype)

    def heads(self, kind: Kind, part: Heads) -> range:
        """Return the heads of a part among all heads of a kind."""
        return self.workload.head_range(kind, part)

    def specs(self, kind: Kind, tokens: int, heads: Heads) -> tuple[TensorSpec, ...]:
        """Return the fields of `tokens` rows for a part of the heads, as they are sent."""
        return _specs(self, kind, tokens, heads)

    def result_specs(self, kind: Kind, tokens: int, heads: Heads, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """Return the fields of results as they are computed: (out, lse), (dq) or (dk, dv)."""
        if kind is Kind.DKV:
            work, count = self.workload, len(self.heads(kind, heads))
            shapes = [(tokens, work.batch, count, size) for size in (work.head_dim, work.value_dim)]
            return tuple(TensorSpec(shape, dtype, self.device) for shape in shapes)
        value, *lse = self.specs(kind, tokens, heads)
        return value._replace(dtype=dtype), *lse


@lru_cache(maxsize=1024)
def _specs(shapes: Shapes, kind: Kind, tokens: int, heads: Heads) -> tuple[TensorSpec, ...]:
    work, device = shapes.workload, shapes.device
    rows = tokens, work.batch, len(shapes.heads(kind, heads))
    if kind in (Kind.KV, Kind.DKV):
        return ((shapes.kv if kind is Kind.KV else shapes.kv_grad).spec(*rows, device),)
    fields = {
        "q": TensorSpec((*rows, work.head_dim), shapes.dtype, device),
        "out": TensorSpec((*rows, work.value_dim), shapes.dtype, device),
        "lse": TensorSpec(rows, shapes.sum_dtype, device),
    }
    return tuple(fields[name] for name in FIELDS[kind])
