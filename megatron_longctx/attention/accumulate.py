"""Where results of several kernel calls come together, in fp32 (fp64 for fp64 inputs).

Partials wait, in the precision they were computed in, until a few of them can be brought together in one pass over
memory. A single result that covers everything is handed through untouched, so one rank alone pays nothing; parts of the
heads that lie side by side go straight to their places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..kernels import MOST_PARTIALS, Partial, merge_partials, sum_partials
from ..kernels.moves import Pair
from .shapes import Like

_ALL = slice(None)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for everything up to fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Waiting(ABC):
    """Partials of a result `[s, b, h, d]`, until they are brought together."""

    def __init__(self, like: Tensor | Like) -> None:
        self._like = like
        self._waiting: list[Partial] = []
        self._borrowed = False
        self._apart = True  # each covers all tokens, and no two of them the same head
        self._covered = 0  # a bit for every head, while they are apart

    def settle(self, lasting: bool = False) -> None:
        """Read what is borrowed: afterwards its memory may be used again. lasting: it will not be before `finish`,
        which then reads different heads where they are."""
        if self._borrowed and not (lasting and self._apart):
            self._fold()

    def _add(self, part: Partial, borrowed: bool) -> None:
        if self._apart:
            tokens, _, heads, _ = part.value.shape
            covered = ((1 << heads) - 1) << part.first_head
            self._apart = tokens == self._like.shape[0] and not covered & self._covered
            self._covered |= covered
        if len(self._waiting) >= MOST_PARTIALS and not self._apart:
            self._fold()
        self._waiting.append(part)
        self._borrowed |= borrowed

    def _single(self) -> Partial | None:
        """The only partial, where it is the whole result as it shall be."""
        if len(self._waiting) != 1 or self._borrowed:
            return None
        (only,) = self._waiting
        whole = only.value.shape == self._like.shape and only.value.dtype == self._like.dtype
        return only if whole else None

    def _fold(self) -> None:
        """Bring all together in an accumulator."""
        while True:
            some, left = self._waiting[:MOST_PARTIALS], self._waiting[MOST_PARTIALS:]
            self._waiting = [self._accumulated(some), *left]
            if not left:
                break
        self._borrowed = self._apart = False

    @abstractmethod
    def _accumulated(self, some: list[Partial]) -> Partial:
        """These brought together, over everything, in the precision of accumulation."""

    def _complete(self) -> bool:
        """Whether what is left are the result's heads, each once and as they shall be: they need only be copied."""
        whole = self._apart and self._covered == (1 << self._like.shape[2]) - 1
        return whole and all(part.value.dtype == self._like.dtype for part in self._waiting)

    def _last(self) -> list[tuple[slice, list[Partial]]]:
        """What is left to be brought together in one pass over memory each: heads of the result, and what there is of
        them, counted from the first."""
        if len(self._waiting) <= MOST_PARTIALS:
            return [(_ALL, self._waiting)]
        if not self._apart or self._covered != (1 << self._like.shape[2]) - 1:
            self._fold()
            return [(_ALL, self._waiting)]
        ordered = sorted(self._waiting, key=lambda part: part.first_head)
        last = []
        for group in (ordered[i : i + MOST_PARTIALS] for i in range(0, len(ordered), MOST_PARTIALS)):
            first = group[0].first_head
            parts = [Partial(0, head - first, value, lse) for _, head, value, lse in group]
            last.append((slice(first, group[-1].last_head), parts))
        return last


class MergedOutput(_Waiting):
    """Partial (out, lse) of one rank's queries, merged. Shapes: q `[s, b, h, d]`, out alike, lse `[s, b, h]`."""

    def __init__(self, q: Tensor | Like) -> None:
        super().__init__(q)
        self._merged: tuple[Tensor, Tensor] | None = None
        self._done: tuple[Tensor, Tensor] | None = None

    def add(self, start: int, out: Tensor, lse: Tensor, heads: slice = _ALL, borrowed: bool = False) -> None:
        """Merge a partial of the queries `start..start+len(out)-1`; a `borrowed` one lasts until `settle`."""
        self._add(Partial(start, heads.start or 0, out, lse), borrowed)

    def finish(self, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse), written to `into` if given; queries without any key give (0, -inf). The same once
        more where it was finished before."""
        if self._done is not None:
            return self._done
        only = self._single() if into is None else None
        if only is not None and only.lse is not None:
            return only.value, only.lse
        out, lse = into or self._new()
        for heads, some in self._last():
            merge_partials(some, _heads(out, heads), _heads(lse, heads))
        self._done = out, lse
        return self._done

    def place(self) -> list[Pair]:
        """Finish where that takes no more than copies, which it gives; else none, and nothing has happened."""
        if self._done is not None or not self._complete() or self._single() is not None:
            return []
        out, lse = self._done = self._new()
        pairs = []
        for part in self._waiting:
            heads = slice(part.first_head, part.last_head)
            assert part.lse is not None
            pairs += [(_heads(out, heads), part.value), (_heads(lse, heads), part.lse)]
        return pairs

    def _accumulated(self, some: list[Partial]) -> Partial:
        if self._merged is None:
            q = self._like
            dtype = accumulation_dtype(q.dtype)
            self._merged = torch.empty(q.shape, dtype=dtype, device=q.device), self._new_lse()
            merge_partials(some, *self._merged)
            return Partial(0, 0, *self._merged)
        before, *added = some  # what has been accumulated comes first; rows that get nothing stay as they are
        start, stop = min(part.start for part in added), max(part.stop for part in added)
        out, lse = (field[start:stop] for field in self._merged)
        own = Partial(0, 0, out, lse)
        merge_partials([own, *(part._replace(start=part.start - start) for part in added)], out, lse)
        return before

    def _new(self) -> tuple[Tensor, Tensor]:
        q = self._like
        return torch.empty(q.shape, dtype=q.dtype, device=q.device), self._new_lse()

    def _new_lse(self) -> Tensor:
        """Heads before tokens in memory: the order in which kernels want it."""
        s, b, h, _ = self._like.shape
        dtype = accumulation_dtype(self._like.dtype)
        return torch.empty((b, h, s), dtype=dtype, device=self._like.device).permute(2, 0, 1)


class Sum(_Waiting):
    """Partial gradients of `like` `[s, b, h, d]`, added up."""

    def __init__(self, like: Tensor | Like) -> None:
        super().__init__(like)
        self._sum: Tensor | None = None
        self._done: Tensor | None = None

    def add(self, start: int, part: Tensor, heads: slice = _ALL, borrowed: bool = False) -> None:
        """Add a share of the gradient of rows `start..start+len(part)-1`; a `borrowed` one lasts until `settle`."""
        self._add(Partial(start, heads.start or 0, part), borrowed)

    def finish(self, into: Tensor | None = None) -> Tensor:
        """The gradient in `like`'s dtype, written to `into` if given. The same once more where it was finished
        before."""
        if self._done is not None:
            return self._done
        only = self._single() if into is None else None
        if only is not None:
            return only.value
        self._done = self._new() if into is None else into
        for heads, some in self._last():
            sum_partials(some, _heads(self._done, heads))
        return self._done

    def place(self) -> list[Pair]:
        """As that of `MergedOutput`."""
        if self._done is not None or not self._complete() or self._single() is not None:
            return []
        self._done = self._new()
        return [(_heads(self._done, slice(part.first_head, part.last_head)), part.value) for part in self._waiting]

    def _new(self) -> Tensor:
        like = self._like
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def _accumulated(self, some: list[Partial]) -> Partial:
        if self._sum is None:
            like = self._like
            self._sum = torch.empty(like.shape, dtype=accumulation_dtype(like.dtype), device=like.device)
        sum_partials(some, self._sum)
        return Partial(0, 0, self._sum)


def _heads(field: Tensor, heads: slice) -> Tensor:
    """Heads of an output, a gradient `[s, b, h, d]` or an lse `[s, b, h]`."""
    return field if heads is _ALL else field.narrow(2, heads.start, heads.stop - heads.start)
