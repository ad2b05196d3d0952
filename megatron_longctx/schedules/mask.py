"""Masks as data: rectangles of queries and keys, each with a band of diagonals.

A band means that query i sees key j if `lo <= j - i <= hi`. Full, causal, inverse causal and windows are four bands,
not four cases; documents, prefixes and shared-prefix trees are lists of rectangles. No code outside this file knows any
of them by name.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from ..errors import refuse

FAR = 1 << 40
"""The bound of a band that has no bound: no sequence is so long."""

Window = tuple[int | None, int | None]
"""The numbers of tokens that a query sees before and after itself, as Megatron's `window_size`; None for no bound."""


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
_NEIGHBOURS: tuple[Callable[[Slice], tuple[_Place, _Place]], ...] = (  # where a slice begins and ends among those of
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


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans that touch or overlap, and return them in ascending order."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            if stop > found[-1][1]:
                found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


class Document(NamedTuple):
    """Tokens `start..stop-1` of the sequence, at positions from `position` on."""

    start: int
    stop: int
    position: int


@dataclass(frozen=True)
class Mask:
    """The keys that every query of a sequence sees.

    length: the number of tokens of the sequence.
    slices: in token numbers, tight, in the order of their queries; no pair is in two slices.
    documents: in order; one for a sequence that is not divided.
    """

    length: int
    slices: tuple[Slice, ...]
    documents: tuple[Document, ...]
    name: str = "mask"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # every call looks up a plan by its mask
        return hash((self.length, self.slices, self.documents))

    @cached_property
    def pairs(self) -> int:
        """The number of visible pairs."""
        return sum(each.pairs for each in self.slices)

    @cached_property
    def has_windows(self) -> bool:
        """Whether some slice is neither full nor causal."""
        return any(each.lo != -FAR or each.hi not in (0, FAR, each.k_stop - each.q_stop) for each in self.slices)

    def slices_of(self, start: int, stop: int) -> tuple[Slice, ...]:
        """Return the slices that may have any of the queries `start..stop-1`."""
        first = bisect_left(self._starts, start - self._longest + 1)
        return self.slices[first : bisect_right(self._starts, stop - 1)]

    @cached_property
    def _starts(self) -> list[int]:
        return [each.q_start for each in self.slices]

    @cached_property
    def _longest(self) -> int:
        return max((each.num_queries for each in self.slices), default=0)

    def __str__(self) -> str:
        return self.name


@lru_cache(maxsize=256)
def causal(length: int) -> Mask:
    """Return the mask in which token i sees tokens 0..i."""
    return documents([length]) if length else Mask(0, (), (), "causal")


@lru_cache(maxsize=256)
def full(length: int) -> Mask:
    """Return the mask in which every token sees every token."""
    return documents([length], causal=False) if length else Mask(0, (), (), "full")


def documents(
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: Window = (None, None),
    prefixes: Sequence[int] | None = None,
    parents: Sequence[int] | None = None,
) -> Mask:
    """Return the mask of consecutive documents that see nothing of each other, except for their parents.

    Query i of a document at position p sees key j at position r if the key is of the same document or of one of its
    ancestors, `p - window[0] <= r <= p + window[1]`, and, if `causal`, `r <= p` or j is among the first `prefixes`
    tokens of the query's own document. Positions count from 0 in a document without a parent; otherwise they continue
    after the parent's last token.

    Args:
        lengths: the number of tokens of each document.
        causal: False for documents whose tokens see each other in both directions. With `parents` that each name the
            previous document, this is a block-causal mask.
        window: see `Window`; (w, 0) or (w, None) with `causal` is a sliding window.
        prefixes: for each document, the number of its first tokens that all of its tokens see (prefix-LM).
        parents: for each document, the number of an earlier one that it continues, or -1: a tree of shared prefixes.

    Raises:
        ValueError: a document without tokens, a negative window, a prefix longer than its document or without
            `causal`, or a parent that is not an earlier document.
    """
    before, after = (FAR if bound is None else bound for bound in window)
    ends = list(accumulate(lengths))
    for number, length in enumerate(lengths):
        if length < 1:
            raise refuse(f"documents[{number}]", length, "1 token or more", "Leave empty documents out.")
    if before < 0 or after < 0:
        raise refuse("window", window, "numbers of tokens from 0 on, or None", "Correct it.")
    _check_each("prefixes", prefixes, [(0, length) for length in lengths])
    _check_each("parents", parents, [(-1, number - 1) for number in range(len(lengths))])
    if prefixes is not None and not causal:
        expected = "none with causal=False, where every token sees all"
        raise refuse("prefixes", "given", expected, "Leave one of them out.")
    placed: list[Document] = []
    slices: list[Slice] = []
    for number, (length, stop) in enumerate(zip(lengths, ends, strict=True)):
        start, parent = stop - length, -1 if parents is None else parents[number]
        above = placed[parent] if parent >= 0 else None
        own = Document(start, stop, 0 if above is None else above.position + above.stop - above.start)
        placed.append(own)
        seen: list[Slice | None] = []
        while parent >= 0:
            by = (placed[parent].start - placed[parent].position) - (start - own.position)
            lowest = -FAR if before == FAR else by - before
            seen.append(Slice(start, stop, placed[parent].start, placed[parent].stop, lowest).tight())
            parent = -1 if parents is None else parents[parent]
        prefix = 0 if prefixes is None else prefixes[number]
        if prefix:
            seen.append(Slice(start, stop, start, start + prefix, -before, after).tight())
        highest = min(after, 0) if causal else after
        seen.append(Slice(start, stop, start + prefix, stop, -before, highest).tight())
        slices += sorted((each for each in seen if each is not None), key=lambda each: each.k_start)
    words = ["causal" if causal else "full"]
    words += [f"{len(lengths)} documents"] * (len(lengths) != 1)
    words += [f"window {window[0]}, {window[1]}"] * (window != (None, None))
    words += ["prefixes"] * (prefixes is not None) + ["a tree"] * (parents is not None)
    return Mask(ends[-1] if ends else 0, tuple(slices), tuple(placed), ", ".join(words))


def _check_each(name: str, values: Sequence[int] | None, ranges: Sequence[tuple[int, int]]) -> None:
    if values is None:
        return
    if len(values) != len(ranges):
        raise refuse(name, f"{len(values)} numbers", f"{len(ranges)}, one for each document", "Correct it.")
    for number, (value, (least, most)) in enumerate(zip(values, ranges, strict=True)):
        if not least <= value <= most:
            raise refuse(f"{name}[{number}]", value, f"{least} to {most}", "Correct it.")


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
