"""What a kernel call has given, and whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .kernel_calls import KernelCall
from .places import narrow
from .plan import Block, Heads, Kind
from .program import Rows, Space

_GAP = 1024
"""Rows between segments of a kernel call from which on its results count as two: less is not worth a part."""


class Made:
    """What a kernel call has given, in numbers of the gathered rows of its `Attend`: rows of keys count from `at`."""

    def __init__(self, number: int, call: KernelCall, at: int, out: Rows | None = None) -> None:
        self.number, self.call, self.at, self._out = number, call, at, out

    @property
    def q_clusters(self) -> list[tuple[int, int]]:
        if self._out is not None:
            return [(0, self._out.tokens)]
        return clusters((each.q_start, each.q_stop) for each in self.call.segments)

    @property
    def k_clusters(self) -> list[tuple[int, int]]:
        return clusters((each.k_start, each.k_stop) for each in self.call.segments)

    def queries(self, kind: Kind, start: int, stop: int, heads: Heads) -> Rows:
        if self._out is not None:
            return narrow(self._out, start, stop)
        first, _ = self.call.q_span
        return Rows(Space.CALL, self.number, kind, start - first, stop - first, heads, heads)

    def keys(self, start: int, stop: int, heads: Heads) -> Rows:
        first, _ = self.call.k_span
        return Rows(Space.CALL, self.number, Kind.DKV, start - first, stop - first, heads, heads)


def clusters(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending spans, joined where hardly any rows lie between them."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and start - found[-1][1] < _GAP:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def in_blocks(blocks: Sequence[Block], start: int, stop: int) -> Iterator[tuple[Block, int, int, int]]:
    """(block, from, to, first slot) of what of the gathered rows `start..stop-1` each block has."""
    at = 0
    for block in blocks:
        low, high = max(start, at), min(stop, at + block.tokens)
        if low < high:
            yield block, low, high, block.start + low - at
        at += block.tokens
