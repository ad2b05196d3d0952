"""Where results of several kernel calls come together, in fp32 (fp64 for fp64 inputs).

Partials wait, in the precision they were computed in, until a few of them can be brought together in one pass over
memory. A single result that covers everything is handed through untouched, so one rank alone pays nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import MOST_PARTIALS, Partial, merge_partials, sum_partials
from .shapes import Like

_ALL = slice(None)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for everything up to fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class MergedOutput:
    """Partial (out, lse) of one rank's queries, merged. Shapes: q `[s, b, h, d]`, out alike, lse `[s, b, h]`."""

    def __init__(self, q: Tensor | Like) -> None:
        self._q = q
        self._waiting: list[Partial] = []
        self._borrowed = False
        self._merged: tuple[Tensor, Tensor] | None = None

    def add(self, start: int, out: Tensor, lse: Tensor, heads: slice = _ALL, borrowed: bool = False) -> None:
        """Merge a partial of the queries `start..start+len(out)-1`; a `borrowed` one lasts until `settle`."""
        if len(self._waiting) == MOST_PARTIALS:
            self._fold()
        self._waiting.append(Partial(start, heads.start or 0, out, lse))
        self._borrowed |= borrowed

    def settle(self) -> None:
        """Read what is borrowed: afterwards its memory may be used again."""
        if self._borrowed:
            self._fold()

    def finish(self, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse), written to `into` if given; queries without any key give (0, -inf)."""
        if into is None and len(self._waiting) == 1 and not self._borrowed:
            (only,) = self._waiting
            if only.value.shape == self._q.shape and only.value.dtype == self._q.dtype and only.lse is not None:
                return only.value, only.lse
        out, lse = into or (torch.empty(self._q.shape, dtype=self._q.dtype, device=self._q.device), self._new_lse())
        merge_partials(self._waiting, out, lse)
        return out, lse

    def _fold(self) -> None:
        if self._merged is None:
            dtype = accumulation_dtype(self._q.dtype)
            self._merged = torch.empty(self._q.shape, dtype=dtype, device=self._q.device), self._new_lse()
        merge_partials(self._waiting, *self._merged)
        self._waiting = [Partial(0, 0, *self._merged)]
        self._borrowed = False

    def _new_lse(self) -> Tensor:
        """Heads before tokens in memory: the order in which kernels want it."""
        s, b, h, _ = self._q.shape
        dtype = accumulation_dtype(self._q.dtype)
        return torch.empty((b, h, s), dtype=dtype, device=self._q.device).permute(2, 0, 1)


class Sum:
    """Partial gradients of `like` `[s, b, h, d]`, added up."""

    def __init__(self, like: Tensor | Like) -> None:
        self._like = like
        self._waiting: list[Partial] = []
        self._borrowed = False
        self._sum: Tensor | None = None

    def add(self, start: int, part: Tensor, heads: slice = _ALL, borrowed: bool = False) -> None:
        """Add a share of the gradient of rows `start..start+len(part)-1`; a `borrowed` one lasts until `settle`."""
        if len(self._waiting) == MOST_PARTIALS:
            self._fold()
        self._waiting.append(Partial(start, heads.start or 0, part))
        self._borrowed |= borrowed

    def settle(self) -> None:
        """Read what is borrowed: afterwards its memory may be used again."""
        if self._borrowed:
            self._fold()

    def finish(self, into: Tensor | None = None) -> Tensor:
        """The gradient in `like`'s dtype, written to `into` if given."""
        if into is None and len(self._waiting) == 1 and not self._borrowed:
            (only,) = self._waiting
            if only.value.shape == self._like.shape and only.value.dtype == self._like.dtype:
                return only.value
        if into is None:
            into = torch.empty(self._like.shape, dtype=self._like.dtype, device=self._like.device)
        sum_partials(self._waiting, into)
        return into

    def _fold(self) -> None:
        if self._sum is None:
            dtype = accumulation_dtype(self._like.dtype)
            self._sum = torch.empty(self._like.shape, dtype=dtype, device=self._like.device)
        sum_partials(self._waiting, self._sum)
        self._waiting = [Partial(0, 0, self._sum)]
        self._borrowed = False
