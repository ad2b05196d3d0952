"""How keys and values are stored, moved and given to a kernel: one object for each way.

A format's rows are one tensor, tokens first and heads before the last dimension, so that they may be cut along both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import refuse
from ..kernels.quantize_kv import SCALE_BYTES, pack_kv, unpack_kv

Pair = tuple[Tensor, Tensor]
"""(into, source) of a copy."""


class Like(NamedTuple):
    """A tensor's shape, dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """A contiguous, uninitialized tensor like this."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class KVFormat(Protocol):
    """A way to store and move keys `[t, b, g, d]` and values `[t, b, g, e]`.

    row_bytes: of a token's head.
    """

    @property
    def row_bytes(self) -> int: ...

    def like(self, tokens: int, batch: int, heads: int, device: torch.device) -> Like:
        """What so many rows look like."""

    def pairs(self, into: Tensor, k: Tensor, v: Tensor) -> list[Pair]:
        """The copies that store keys and values in rows; computes what no copy can do."""

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of rows, for the kernel."""


MakeFormat = Callable[[int, int, torch.dtype], KVFormat]
"""From head dimensions of keys and of values and the dtype of both; a format's class may be one."""


def plain_kv(head_dim: int, value_dim: int, dtype: torch.dtype) -> KVFormat:
    """Keys and values as they are."""
    return StackedKV(head_dim, dtype) if head_dim == value_dim else JoinedKV(head_dim, value_dim, dtype)


def int8_kv(head_dim: int, value_dim: int, dtype: torch.dtype) -> KVFormat:
    """Keys and values as 8-bit integers.

    Raises:
        ValueError: the head dimensions differ.
    """
    if head_dim != value_dim:
        raise refuse("head dimension of values", value_dim, f"{head_dim}, as of keys", "Leave attention.kv_int8 out.")
    return Int8KV(head_dim, dtype)


@dataclass(frozen=True)
class StackedKV:
    """Keys `[t, 0]` and values `[t, 1]` of `[t, 2, b, g, d]`: of one head size."""

    head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return 2 * self.head_dim * self.dtype.itemsize

    def like(self, tokens: int, batch: int, heads: int, device: torch.device) -> Like:
        return Like((tokens, 2, batch, heads, self.head_dim), self.dtype, device)

    def pairs(self, into: Tensor, k: Tensor, v: Tensor) -> list[Pair]:
        return [(into[:, 0], k), (into[:, 1], v)]

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        k, v = rows.unbind(1)
        return k, v


@dataclass(frozen=True)
class JoinedKV:
    """A head's key and its value one behind the other: any two head sizes."""

    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return (self.head_dim + self.value_dim) * self.dtype.itemsize

    def like(self, tokens: int, batch: int, heads: int, device: torch.device) -> Like:
        return Like((tokens, batch, heads, self.head_dim + self.value_dim), self.dtype, device)

    def pairs(self, into: Tensor, k: Tensor, v: Tensor) -> list[Pair]:
        keys, values = self.split(into)
        return [(keys, k), (values, v)]

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[..., : self.head_dim], rows[..., self.head_dim :]


@dataclass(frozen=True)
class LatentKV:
    """One latent vector a token: the key is all of it, the value its first elements (MLA, absorbed).

    head_dim: of the latent. value_dim: of the value.
    """

    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.dtype.itemsize

    def like(self, tokens: int, batch: int, heads: int, device: torch.device) -> Like:
        return Like((tokens, batch, heads, self.head_dim), self.dtype, device)

    def pairs(self, into: Tensor, k: Tensor, v: Tensor) -> list[Pair]:
        return [(into, k)]

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows, rows[..., : self.value_dim]


@dataclass(frozen=True)
class Int8KV:
    """8-bit integers with a scale for every token and head (`kernels.quantize_kv`); forward only. What is computed with
    them is in `dtype`."""

    head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return 2 * (self.head_dim + SCALE_BYTES)

    def like(self, tokens: int, batch: int, heads: int, device: torch.device) -> Like:
        return Like((tokens, 2, batch, heads, self.head_dim + SCALE_BYTES), torch.uint8, device)

    def pairs(self, into: Tensor, k: Tensor, v: Tensor) -> list[Pair]:
        pack_kv(k, v, into)
        return []

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return unpack_kv(rows, self.dtype)
