"""Large kernel calls cut into pieces of few shapes, for kernels that prepare themselves for every new shape.

Counted in tokens, never in slots: where in the cache tokens lie changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ..kernels.planned import PlannedShapes
from ..schedules.visibility import Region


def pieces(queries: int, keys: int, causal: bool, shapes: PlannedShapes | None) -> Iterator[Region]:
    """A call in pieces that cover it once: as many as are worth it of `shapes`, and what is left over.

    A causal square is cut into a smaller one, the rectangle below it and what is left of the square. A call too small
    for any of the shapes, and any call without `shapes`, is one piece.
    """
    whole = Region(0, queries, 0, keys, causal)
    if shapes is None:
        yield whole
    elif causal:
        yield from _square(queries, shapes)
    else:
        yield from _rectangle(whole, shapes)


def _square(size: int, shapes: PlannedShapes) -> Iterator[Region]:
    start = 0
    while start < size:
        left = size - start
        first = min(shapes.most, 1 << left.bit_length() - 1)
        if not shapes.has(first, first, True):
            yield Region(start, size, start, size, left > 1)
            return
        stop = start + first
        yield Region(start, stop, start, stop, True)
        if stop < size:
            yield from _rectangle(Region(stop, size, start, stop, False), shapes)
        start = stop


def _rectangle(region: Region, shapes: PlannedShapes) -> Iterator[Region]:
    """Planned pieces first, row by row, as that is the order in which partial results merge with the least memory
    traffic. As columns get smaller, those that are not worth a call come last and are left over together."""
    rows = _powers(range(region.q_start, region.q_stop), shapes.least_queries, shapes.most)
    columns = _powers(range(region.k_start, region.k_stop), shapes.least_keys, shapes.most)
    left = [region.k_start] * len(rows)  # by row, the first key that none of its calls has
    for i, row in enumerate(rows):
        for column in columns:
            if shapes.has(len(row), len(column), False):
                yield Region(row.start, row.stop, column.start, column.stop, False)
                left[i] = column.stop
    rest = range(rows[-1].stop if rows else region.q_start, region.q_stop)
    by_first = groupby(zip([*rows, rest], [*left, region.k_start], strict=True), key=lambda pair: pair[1])
    for k_start, together in by_first:
        own = [row for row, _ in together]
        if own[0].start < own[-1].stop and k_start < region.k_stop:
            yield Region(own[0].start, own[-1].stop, k_start, region.k_stop, False)


def _powers(span: range, least: int, most: int) -> list[range]:
    """The span's beginning in powers of two, the largest first; less than `least` is left over."""
    found, start, size = [], span.start, most
    while size >= least:
        while span.stop - start >= size:
            found.append(range(start, start + size))
            start += size
        size //= 2
    return found
