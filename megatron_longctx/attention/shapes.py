"""What the tensors of a pass look like, whatever their values: worked out once for all passes of a kind."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..schedules import Heads, Kind

_HOME_OF = {Kind.OUT: Kind.Q, Kind.DQ: Kind.Q_GRAD, Kind.DKV: Kind.KV} | {
    kind: kind for kind in (Kind.Q, Kind.KV, Kind.Q_GRAD, Kind.GRAD)
}
"""Whose heads a kind has: those of the rank's own tensors of this kind."""


class Like(NamedTuple):
    """A tensor's shape, dtype and device, for those that need no more of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """A contiguous, uninitialized tensor like this."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def like(tensor: Tensor) -> Like:
    return Like(tuple(tensor.shape), tensor.dtype, tensor.device)


def heads_dim(field: Tensor | Like) -> int:
    """The dimension of the heads: an lse `[t, b, h]` has none after them."""
    num_dims = len(field.shape)
    return 2 if num_dims == 3 else num_dims - 2


def head_slice(num_heads: int, part: Heads) -> slice:
    """The heads of one of `part.parts` equal parts; where parts outnumber heads, neighbours share one.

    Raises:
        ValueError: neither number divides the other.
    """
    if num_heads % part.parts == 0:
        size = num_heads // part.parts
        return slice(part.part * size, (part.part + 1) * size)
    if part.parts % num_heads == 0:
        head = part.part * num_heads // part.parts
        return slice(head, head + 1)
    raise ValueError(
        f"{num_heads} heads in {part.parts} parts: expected a divisor or a multiple of {num_heads}. "
        "Change the number of ranks that share the heads."
    )


class Shapes:
    """The fields of every kind of block in one kind of pass.

    Args:
        fields: by kind, what this rank's own tensors look like, and the results that it gets; tokens first.
    """

    def __init__(self, fields: dict[Kind, tuple[Like, ...]]) -> None:
        self._fields = fields
        self._heads: dict[tuple[Kind, Heads], slice] = {}
        self._rows: dict[tuple[Kind, int, int], tuple[Like, ...]] = {}

    def own(self, kind: Kind) -> tuple[Like, ...]:
        """All of this rank's own fields of a kind."""
        return self._fields[kind]

    def num_heads(self, kind: Kind) -> int:
        return self._fields[_HOME_OF[kind]][0].shape[-2]

    def heads(self, kind: Kind, heads: Heads) -> slice:
        """Where a part of the heads lies among all heads of a kind."""
        key = kind, heads
        if key not in self._heads:
            self._heads[key] = head_slice(self.num_heads(kind), heads)
        return self._heads[key]

    def rows(self, kind: Kind, tokens: int, parts: int = 1) -> tuple[Like, ...]:
        """So many rows of one of `parts` parts of the heads, by field."""
        key = kind, tokens, parts
        if key not in self._rows:
            self._rows[key] = tuple(self._part(field, kind, tokens, parts) for field in self._fields[kind])
        return self._rows[key]

    def row_bytes(self, kind: Kind, parts: int) -> list[int]:
        """Of one token, by field."""
        return [math.prod(row.shape) * row.dtype.itemsize for row in self.rows(kind, 1, parts)]

    def _part(self, field: Like, kind: Kind, tokens: int, parts: int) -> Like:
        shape = [tokens, *field.shape[1:]]
        if parts > 1:
            part = self.heads(kind, Heads(0, parts))
            shape[heads_dim(field)] = part.stop - part.start
        return field._replace(shape=tuple(shape))
