"""Where results of several kernel calls come together, in fp32 (fp64 for fp64 inputs).

A single result that covers everything is handed through untouched, so one rank alone pays nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import merge_into

_ALL = slice(None)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for everything up to fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class MergedOutput:
    """Partial (out, lse) of one rank's queries, merged. Shapes: q `[s, b, h, d]`, out alike, lse `[s, b, h]`."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._only: tuple[Tensor, Tensor] | None = None
        self._merged: tuple[Tensor, Tensor] | None = None

    def add(self, start: int, out: Tensor, lse: Tensor, heads: slice = _ALL, borrowed: bool = False) -> None:
        """Merge a partial of the queries `start..start+len(out)-1`; a `borrowed` one is read now and never kept."""
        if self._merged is None and self._only is None and out.shape == self._q.shape and not borrowed:
            self._only = (out, lse)
            return
        acc_out, acc_lse = self._accumulators()
        stop = start + out.shape[0]
        merge_into(acc_out[start:stop, :, heads], acc_lse[start:stop, :, heads], out, lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse); queries without any key give (0, -inf)."""
        if self._only is not None and self._merged is None:
            return self._only
        out, lse = self._accumulators()
        return out.to(self._q.dtype), lse

    def _accumulators(self) -> tuple[Tensor, Tensor]:
        if self._merged is None:
            s, b, h, _ = self._q.shape
            dtype = accumulation_dtype(self._q.dtype)
            # Heads before tokens in memory: the order in which kernels want their lse.
            lse = torch.empty((b, h, s), dtype=dtype, device=self._q.device).permute(2, 0, 1)
            if self._only is not None:
                out = self._only[0].to(dtype=dtype, memory_format=torch.contiguous_format, copy=True)
                lse.copy_(self._only[1])
            else:
                out = torch.zeros(self._q.shape, dtype=dtype, device=self._q.device)
                lse.fill_(-torch.inf)
            self._merged = (out, lse)
        return self._merged


class Sum:
    """Partial gradients of `like` `[s, ...]`, added up."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._only: Tensor | None = None
        self._sum: Tensor | None = None

    def add(self, start: int, part: Tensor, heads: slice = _ALL, borrowed: bool = False) -> None:
        """Add a share of the gradient of rows `start..start+len(part)-1`; a `borrowed` one is read now, never kept."""
        if self._sum is None and self._only is None and part.shape == self._like.shape and not borrowed:
            self._only = part
            return
        self._accumulator()[start : start + part.shape[0]][..., heads, :] += part

    def finish(self) -> Tensor:
        """The gradient in `like`'s dtype."""
        if self._only is not None and self._sum is None:
            return self._only
        return self._accumulator().to(self._like.dtype)

    def _accumulator(self) -> Tensor:
        if self._sum is None:
            dtype = accumulation_dtype(self._like.dtype)
            if self._only is not None:
                self._sum = self._only.to(dtype=dtype, memory_format=torch.contiguous_format, copy=True)
            else:
                self._sum = torch.zeros(self._like.shape, dtype=dtype, device=self._like.device)
        return self._sum


class Gathering:
    """A result for another rank, from its first part to the message that takes it along."""

    def __init__(self, total: MergedOutput | Sum) -> None:
        self._total = total
        self.fields: tuple[Tensor, ...] = ()

    def add(self, start: int, *fields: Tensor) -> None:
        """Merge what was computed for the rows from `start` on."""
        self._total.add(start, *fields)  # type: ignore[arg-type]

    def close(self) -> None:
        """Make `fields` ready to be sent, contiguous and in the precision of the inputs."""
        total = self._total.finish()
        self.fields = tuple(field.contiguous() for field in (total if isinstance(total, tuple) else (total,)))
        del self._total
