"""Slices: rectangles of queries and keys, each with a band of diagonals. Masks and kernel calls are lists of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

FAR = 1 << 40
"""The bound of a band that has no bound: no sequence is so long."""


class Slice(NamedTuple):
    """Queries `q_start..q_stop-1` against keys `k_start..k_stop-1`, where query i sees key j if `lo <= j - i <= hi`.

    The owner of a slice defines what the numbers count: tokens of a sequence, slots of ranks, rows of a kernel call.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int = -FAR
    hi: int = FAR

    @property
    def num_queries(self) -> int:
        return self.q_stop - self.q_start

    @property
    def num_keys(self) -> int:
        return self.k_stop - self.k_start

    @property
    def is_full(self) -> bool:
        """Whether every query of a tight slice sees every key."""
        return self.lo == -FAR and self.hi == FAR

    @property
    def pairs(self) -> int:
        """The number of visible pairs."""
        if self.is_full:
            return self.num_queries * self.num_keys
        return self._up_to(self.hi) - self._up_to(self.lo - 1)

    def _up_to(self, bound: int) -> int:
        """Return the number of pairs with `j - i <= bound`."""
        keys = self.num_keys
        first = self.q_start + bound + 1 - self.k_start  # keys that the first query sees, before clipping to 0..keys
        return _clipped(first + self.num_queries - 1, keys) - _clipped(first - 1, keys)

    def moved(self, queries: int, keys: int) -> Slice:
        """Return the same pairs with all query numbers increased by `queries` and all key numbers by `keys`."""
        q0, q1, k0, k1, lo, hi = self
        by = keys - queries
        lo, hi = (lo if lo == -FAR else lo + by), (hi if hi == FAR else hi + by)
        return Slice(q0 + queries, q1 + queries, k0 + keys, k1 + keys, lo, hi)

    def tight(self) -> Slice | None:
        """Return the smallest slice of the same pairs, without bounds that exclude nothing; None if it has no pair."""
        q0, q1, k0, k1, lo, hi = self
        q0, q1 = max(q0, k0 - hi), min(q1, k1 - lo)
        k0, k1 = max(k0, q0 + lo), min(k1, q1 + hi)
        if q0 >= q1 or k0 >= k1 or lo > hi:
            return None
        return Slice(q0, q1, k0, k1, -FAR if lo <= k0 - q1 + 1 else lo, FAR if hi >= k1 - 1 - q0 else hi)

    def cut(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Slice | None:
        """Return the part in a rectangle, tight; None if it has no pair."""
        q0, q1, k0, k1, lo, hi = self
        return Slice(max(q0, q_start), min(q1, q_stop), max(k0, k_start), min(k1, k_stop), lo, hi).tight()

    def overlap(self, other: Slice) -> Slice | None:
        """Return the pairs that are in both slices, tight; None if there are none."""
        q0, q1, k0, k1, lo, hi = other
        band = max(self.lo, lo), min(self.hi, hi)
        q, k = (max(self.q_start, q0), min(self.q_stop, q1)), (max(self.k_start, k0), min(self.k_stop, k1))
        return Slice(*q, *k, *band).tight()

    def __str__(self) -> str:
        bounds = [f"{self.lo} <= j - i"] * (self.lo != -FAR) + [f"j - i <= {self.hi}"] * (self.hi != FAR)
        band = f" where {' and '.join(bounds)}" if bounds else ""
        return f"[{self.q_start}:{self.q_stop}] x [{self.k_start}:{self.k_stop}]{band}"


def _clipped(last: int, most: int) -> int:
    """Return the sum of `min(max(x, 0), most)` over all x up to `last`."""
    if last <= 0:
        return 0
    low = min(last, most)
    return low * (low + 1) // 2 + most * max(0, last - most)


_Place = tuple[int, int, int]  # where slices of one kind of neighbours begin or end
_NEIGHBOURS: tuple[Callable[[Slice], tuple[_Place, _Place]], ...] = (  # where a slice begins and ends, in lists by
    lambda each: (each[:3], (each.q_start, each.q_stop, each.k_stop)),  # the same queries
    lambda each: ((each.k_start, each.q_start, 0), (each.k_start, each.q_stop, 0)),  # the same first key
    lambda each: ((each.k_start, 0, 0), (each.k_stop, 0, 0)),  # adjacent keys, whose queries a band shifts
)


def joined(slices: Iterable[Slice]) -> list[Slice]:
    """Replace slices that form a larger slice by that slice, in the order of the first of each.

    Keys are joined before queries, so that calls get long rows of keys: a rectangle before a causal square becomes a
    causal rectangle, and with the square of the preceding queries this becomes a larger causal square.
    """
    found = list(slices)
    while len(found) > 1:
        before = len(found)
        for ends in _NEIGHBOURS:
            found = _joined_by(ends, found)
        if len(found) == before:
            break
    return found


def _joined_by(ends: Callable[[Slice], tuple[_Place, _Place]], slices: Iterable[Slice]) -> list[Slice]:
    merged: list[Slice] = []
    open_ends: dict[_Place, int] = {}  # the index in `merged` of the slice that ends at a place
    for each in slices:
        start, stop = ends(each)
        index = open_ends.get(start)
        union = None if index is None else _union(merged[index], each)
        if index is None or union is None:
            index = len(merged)
            merged.append(each)
        else:
            del open_ends[start]
            merged[index] = union
            _, stop = ends(union)
        open_ends[stop] = index
    return merged


def _union(a: Slice, b: Slice) -> Slice | None:
    """Return both as one slice if they form one; `b` follows `a` in keys or in queries."""
    beside = a.k_stop == b.k_start  # then `a` may have the lower bound of both, and `b` the upper one
    if a.is_full and b.is_full:
        if beside:
            return Slice(*a[:3], b.k_stop) if a[:2] == b[:2] else None
        return Slice(a.q_start, b.q_stop, *a[2:4]) if a[2:4] == b[2:4] and a.q_stop == b.q_start else None
    lo, hi = (a.lo, b.hi) if beside else (min(a.lo, b.lo), max(a.hi, b.hi) if a.hi != FAR != b.hi else min(a.hi, b.hi))
    q_start, q_stop = min(a.q_start, b.q_start), max(a.q_stop, b.q_stop)
    whole = Slice(q_start, q_stop, a.k_start, max(a.k_stop, b.k_stop), lo, hi).tight()
    if whole is None or whole.pairs != a.pairs + b.pairs:
        return None
    inside = all((common := whole.overlap(each)) is not None and common.pairs == each.pairs for each in (a, b))
    return whole if inside else None


class _Run(NamedTuple):
    """Consecutive queries whose spans of keys all begin, and all end, at a fixed key or one key later per query."""

    first: int  # the first query
    spans: tuple[tuple[int, int], ...]  # of the first query
    last: tuple[tuple[int, int], ...]  # of the last query
    shifts: tuple[tuple[int, int], ...] | None  # of starts and stops from query to query; None for one query

    def slices(self, stop: int) -> Iterator[Slice]:
        shifts = self.shifts or ((0, 0),) * len(self.spans)
        for (start, end), (_, k_stop), (start_shift, end_shift) in zip(self.spans, self.last, shifts, strict=True):
            lo = start - self.first if start_shift else -FAR
            yield Slice(self.first, stop, start, k_stop, lo, end - 1 - self.first if end_shift else FAR)


def canonical(slices: Iterable[Slice]) -> list[Slice]:
    """Return the same pairs in slices that depend only on these pairs, not on how they were cut."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for q_start, q_stop, k_start, k_stop, lo, hi in slices:
        for q in range(q_start, q_stop):
            seen.setdefault(q, []).append((max(k_start, q + lo), min(k_stop, q + hi + 1)))
    found: list[Slice] = []
    run: _Run | None = None
    before = 0
    for q in sorted(seen):
        spans = tuple(merge_spans(span for span in seen[q] if span[0] < span[1]))
        shifts = None
        if run is not None and before == q - 1 and len(spans) == len(run.last):
            pairs = zip(spans, run.last, strict=True)
            shifts = tuple((now[0] - then[0], now[1] - then[1]) for now, then in pairs)
            if run.shifts not in (None, shifts) or not all({0, 1}.issuperset(each) for each in shifts):
                shifts = None
        if run is not None and shifts is not None:
            run = run._replace(last=spans, shifts=shifts)
        else:
            found += () if run is None else run.slices(before + 1)
            run = _Run(q, spans, spans, None)
        before = q
    return found if run is None else [*found, *run.slices(before + 1)]


def merge_spans(spans: Iterable[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """Merge spans with at most `gap` rows between them, and return them in ascending order."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def band_between(each: Slice, queries: range, keys: range) -> Iterator[Slice]:
    """Yield the pairs of a slice of tokens that are between `queries` and `keys`, in indices of these ranges.

    This is one slice if both ranges have the same step or no bound excludes anything, else one slice per key.
    """
    q = indices_within(queries, each.q_start, each.q_stop)
    k = indices_within(keys, each.k_start, each.k_stop)
    if not q or not k:
        return
    if each.lo <= keys[k.start] - queries[q.stop - 1] and keys[k.stop - 1] - queries[q.start] <= each.hi:
        yield Slice(q.start, q.stop, k.start, k.stop)
        return
    same_step = queries.step == keys.step
    for some in [k] if same_step or len(q) == 1 else (range(index, index + 1) for index in k):
        step = keys.step if len(some) > 1 else queries.step
        # Key number b and query number a are `by + step * (b - a)` apart.
        by = keys[some.start] - queries[q.start] - step * (some.start - q.start)
        lo = -FAR if each.lo == -FAR else -((by - each.lo) // step)
        hi = FAR if each.hi == FAR else (each.hi - by) // step
        found = Slice(q.start, q.stop, some.start, some.stop, lo, hi).tight()
        if found is not None:
            yield found


def indices_within(tokens: range, start: int, stop: int) -> range:
    """Return the indices of the elements of `tokens` that are in `start..stop-1`."""
    first = max(0, -((tokens.start - start) // tokens.step)) if tokens.start < start else 0
    last = min(len(tokens), -((tokens.start - stop) // tokens.step))
    return range(first, max(first, last))
