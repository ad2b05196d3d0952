"""What the tokens of a sequence may see, as data: rectangles of queries and keys, each with a band of diagonals.

A band says that query i sees key j where `lo <= j - i <= hi`. Full, causal, inverse causal and windows are four bands,
not four cases; documents, prefixes and shared-prefix trees are lists of rectangles. Nothing below this room knows any
of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from ..errors import refuse

FAR = 1 << 40
"""A bound of a band that binds nothing: no sequence is so long."""

Window = tuple[int | None, int | None]
"""Tokens that a query sees before and after itself, as Megatron's `window_size`; None for no bound."""


class Slice(NamedTuple):
    """Queries `q_start..q_stop-1` against keys `k_start..k_stop-1`: query i sees key j if `lo <= j - i <= hi`.

    Numbers are those of whatever holds it: tokens of a sequence, slots of two ranks, rows of a kernel call.
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
        """Whether no bound of the band binds. Of a tight slice."""
        return self.lo == -FAR and self.hi == FAR

    @property
    def pairs(self) -> int:
        """Visible pairs."""
        if self.is_full:
            return self.num_queries * self.num_keys
        return self._up_to(self.hi) - self._up_to(self.lo - 1)

    def _up_to(self, bound: int) -> int:
        """Pairs with `j - i <= bound`."""
        keys = self.num_keys
        first = self.q_start + bound + 1 - self.k_start  # keys that the first query sees, before clipping to 0..keys
        return _clipped(first + self.num_queries - 1, keys) - _clipped(first - 1, keys)

    def sees(self, query: int, key: int) -> bool:
        inside = self.q_start <= query < self.q_stop and self.k_start <= key < self.k_stop
        return inside and self.lo <= key - query <= self.hi

    def moved(self, queries: int, keys: int) -> Slice:
        """The same pairs, where queries and keys have numbers that are so much higher."""
        q0, q1, k0, k1, lo, hi = self
        by = keys - queries
        lo, hi = (lo if lo == -FAR else lo + by), (hi if hi == FAR else hi + by)
        return Slice(q0 + queries, q1 + queries, k0 + keys, k1 + keys, lo, hi)

    def tight(self) -> Slice | None:
        """The smallest slice of the same pairs, with bounds that bind nothing left out; None where there is no pair."""
        q0, q1, k0, k1, lo, hi = self
        q0, q1 = max(q0, k0 - hi), min(q1, k1 - lo)
        k0, k1 = max(k0, q0 + lo), min(k1, q1 + hi)
        if q0 >= q1 or k0 >= k1 or lo > hi:
            return None
        return Slice(q0, q1, k0, k1, -FAR if lo <= k0 - q1 + 1 else lo, FAR if hi >= k1 - 1 - q0 else hi)

    def cut(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Slice | None:
        """What of it lies in a rectangle, tight; None where nothing does."""
        q0, q1, k0, k1, lo, hi = self
        return Slice(max(q0, q_start), min(q1, q_stop), max(k0, k_start), min(k1, k_stop), lo, hi).tight()

    def overlap(self, other: Slice) -> Slice | None:
        """The pairs that are in both, tight; None where there is none."""
        q0, q1, k0, k1, lo, hi = other
        band = max(self.lo, lo), min(self.hi, hi)
        q, k = (max(self.q_start, q0), min(self.q_stop, q1)), (max(self.k_start, k0), min(self.k_stop, k1))
        return Slice(*q, *k, *band).tight()

    def __str__(self) -> str:
        bounds = [f"{self.lo} <= j - i"] * (self.lo != -FAR) + [f"j - i <= {self.hi}"] * (self.hi != FAR)
        band = f" where {' and '.join(bounds)}" if bounds else ""
        return f"[{self.q_start}:{self.q_stop}] x [{self.k_start}:{self.k_stop}]{band}"


def _clipped(last: int, most: int) -> int:
    """The sum of `min(max(x, 0), most)` over all x up to `last`."""
    if last <= 0:
        return 0
    low = min(last, most)
    return low * (low + 1) // 2 + most * max(0, last - most)


def joined(slices: Iterable[Slice]) -> list[Slice]:
    """Slices that make up a larger one as that one, in the order of the first of each.

    Keys are joined before queries, so that calls get long rows of keys: a rectangle in front of a causal square is a
    causal rectangle, and with the square of the queries before these it is a larger causal square.
    """
    found = list(slices)
    while len(found) > 1:
        before = len(found)
        for ends in (_by_keys, _by_queries, _by_band):
            found = _joined_by(ends, found)
        if len(found) == before:
            break
    return found


_Place = tuple[int, int, int]  # where slices of one kind of neighbours begin or end


def _joined_by(ends: Callable[[Slice], tuple[_Place, _Place]], slices: Iterable[Slice]) -> list[Slice]:
    merged: list[Slice] = []
    open_ends: dict[_Place, int] = {}  # where a slice may be continued: its place in `merged`
    for each in slices:
        start, stop = ends(each)
        place = open_ends.get(start)
        union = None if place is None else _union(merged[place], each)
        if place is None or union is None:
            place = len(merged)
            merged.append(each)
        else:
            del open_ends[start]
            merged[place] = union
            _, stop = ends(union)
        open_ends[stop] = place
    return merged


def _by_keys(each: Slice) -> tuple[_Place, _Place]:
    """Where a slice begins and ends among those of the same queries."""
    return (each.q_start, each.q_stop, each.k_start), (each.q_start, each.q_stop, each.k_stop)


def _by_queries(each: Slice) -> tuple[_Place, _Place]:
    """Where a slice begins and ends among those that begin with the same key."""
    return (each.k_start, each.q_start, 0), (each.k_start, each.q_stop, 0)


def _by_band(each: Slice) -> tuple[_Place, _Place]:
    """Where a slice begins and ends among those of neighbouring keys, whose queries a band shifts."""
    return (each.k_start, 0, 0), (each.k_stop, 0, 0)


def _union(a: Slice, b: Slice) -> Slice | None:
    """Both as one slice, if together they are one: `b` behind `a` in keys or in queries."""
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
    """Consecutive queries whose keys begin and end alike: at the same key, or one key later for every query."""

    first: int
    spans: tuple[tuple[int, int], ...]  # of the first query
    last: tuple[tuple[int, int], ...]  # of the last one
    shifts: tuple[tuple[int, int], ...] | None  # of starts and stops from query to query; None for one query

    def slices(self, stop: int) -> Iterator[Slice]:
        shifts = self.shifts or ((0, 0),) * len(self.spans)
        for (start, end), (_, k_stop), (of_start, of_end) in zip(self.spans, self.last, shifts, strict=True):
            lo = start - self.first if of_start else -FAR
            yield Slice(self.first, stop, start, k_stop, lo, end - 1 - self.first if of_end else FAR)


def canonical(slices: Iterable[Slice]) -> list[Slice]:
    """The same pairs in slices that depend on these pairs alone, not on how they were cut."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for q_start, q_stop, k_start, k_stop, lo, hi in slices:
        for q in range(q_start, q_stop):
            seen.setdefault(q, []).append((max(k_start, q + lo), min(k_stop, q + hi + 1)))
    found: list[Slice] = []
    run: _Run | None = None
    before = 0
    for q in sorted(seen):
        spans = tuple(runs(span for span in seen[q] if span[0] < span[1]))
        shifts = None
        if run is not None and before == q - 1 and len(spans) == len(run.last):
            pairs = zip(spans, run.last, strict=True)
            shifts = tuple((now[0] - then[0], now[1] - then[1]) for now, then in pairs)
        if run is not None and shifts is not None and _continues(run, shifts):
            run = run._replace(last=spans, shifts=shifts)
        else:
            found += () if run is None else run.slices(before + 1)
            run = _Run(q, spans, spans, None)
        before = q
    return found if run is None else [*found, *run.slices(before + 1)]


def _continues(run: _Run, shifts: tuple[tuple[int, int], ...]) -> bool:
    return run.shifts == shifts if run.shifts is not None else all({0, 1}.issuperset(each) for each in shifts)


def runs(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that touch or overlap as one, in ascending order."""
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
    """What every query of a sequence sees.

    length: tokens of the sequence. slices: in numbers of tokens, tight, in the order of their queries; no pair is in
    two. documents: in order; where the sequence is none of documents, one.
    """

    length: int
    slices: tuple[Slice, ...]
    documents: tuple[Document, ...]
    name: str = "mask"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # asked for in every call
        return hash((self.length, self.slices, self.documents))

    @cached_property
    def pairs(self) -> int:
        """Visible pairs."""
        return sum(each.pairs for each in self.slices)

    @cached_property
    def has_windows(self) -> bool:
        """Whether some query sees only the nearest keys, or not all up to itself."""
        return any(each.lo != -FAR or each.hi not in (0, FAR, each.k_stop - each.q_stop) for each in self.slices)

    def __str__(self) -> str:
        return self.name


@lru_cache(maxsize=256)
def causal(length: int) -> Mask:
    """Token i sees tokens 0..i."""
    return documents([length]) if length else Mask(0, (), (), "causal")


@lru_cache(maxsize=256)
def full(length: int) -> Mask:
    """Every token sees every token."""
    return documents([length], causal=False) if length else Mask(0, (), (), "full")


def documents(
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: Window = (None, None),
    prefixes: Sequence[int] | None = None,
    parents: Sequence[int] | None = None,
) -> Mask:
    """The mask of documents that lie one after the other and see nothing of each other, but for their parents.

    Query i of a document at position p sees key j at position r where the key is of the same document or of one of its
    ancestors, `p - window[0] <= r <= p + window[1]`, and, under `causal`, `r <= p` or j is among the first `prefixes`
    tokens of the query's own document. Positions count from 0 in a document without parent; they go on where the
    parent's last token is otherwise.

    Args:
        lengths: tokens of each.
        causal: False for documents whose tokens see each other in both directions. With `parents` that each name the
            document before, this is a block-causal mask.
        window: see `Window`; (w, 0) or (w, None) with `causal` is a sliding window.
        prefixes: by document, its first tokens that all of its tokens see (prefix-LM).
        parents: by document, the number of an earlier one that it continues, or -1: a tree of shared prefixes.

    Raises:
        ValueError: a document without tokens, a negative window, a prefix longer than its document or without
            `causal`, or a parent that does not come before.
    """
    before, after = (FAR if bound is None else bound for bound in window)
    ends = list(accumulate(lengths))
    for number, length in enumerate(lengths):
        if length < 1:
            raise refuse(f"documents[{number}]", length, "1 token or more", "Leave empty documents out.")
    if before < 0 or after < 0:
        raise refuse("window", window, "numbers of tokens from 0 on, or None", "Correct it.")
    _check_of_documents("prefixes", prefixes, lengths, [(0, length) for length in lengths])
    _check_of_documents("parents", parents, lengths, [(-1, number - 1) for number in range(len(lengths))])
    if prefixes is not None and not causal:
        expected = "none with causal=False, where every token sees all"
        raise refuse("prefixes", "given", expected, "Leave one of them out.")
    found: list[Document] = []
    slices: list[Slice] = []
    for number, (length, stop) in enumerate(zip(lengths, ends, strict=True)):
        start, parent = stop - length, -1 if parents is None else parents[number]
        above = found[parent] if parent >= 0 else None
        own = Document(start, stop, 0 if above is None else above.position + above.stop - above.start)
        found.append(own)
        seen: list[Slice | None] = []
        while parent >= 0:
            by = (found[parent].start - found[parent].position) - (start - own.position)
            lowest = -FAR if before == FAR else by - before
            seen.append(Slice(start, stop, found[parent].start, found[parent].stop, lowest).tight())
            parent = -1 if parents is None else parents[parent]
        prefix = 0 if prefixes is None else prefixes[number]
        if prefix:
            seen.append(Slice(start, stop, start, start + prefix, -before, after).tight())
        highest = min(after, 0) if causal else after
        seen.append(Slice(start, stop, start + prefix, stop, -before, highest).tight())
        slices += sorted((each for each in seen if each is not None), key=lambda each: each.k_start)
    name = _name(len(lengths), causal, window, prefixes, parents)
    return Mask(ends[-1] if ends else 0, tuple(slices), tuple(found), name)


def _check_of_documents(
    name: str, values: Sequence[int] | None, lengths: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> None:
    if values is None:
        return
    if len(values) != len(lengths):
        raise refuse(name, f"{len(values)} numbers", f"{len(lengths)}, one for each document", "Correct it.")
    for number, (value, (least, most)) in enumerate(zip(values, ranges, strict=True)):
        if not least <= value <= most:
            raise refuse(f"{name}[{number}]", value, f"{least} to {most}", "Correct it.")


def _name(
    count: int, causal: bool, window: Window, prefixes: Sequence[int] | None, parents: Sequence[int] | None
) -> str:
    words = ["causal" if causal else "full"]
    words += [f"{count} documents"] * (count != 1)
    words += [f"window {window[0]}, {window[1]}"] * (window != (None, None))
    words += ["prefixes"] * (prefixes is not None) + ["a tree"] * (parents is not None)
    return ", ".join(words)


def band_between(each: Slice, queries: range, keys: range) -> Iterator[Slice]:
    """The pairs of a slice of tokens that evenly spaced tokens have, numbered by their places in `queries` and `keys`.

    One slice where both are spaced alike or no bound binds, else one for every key.
    """
    q = within(queries, each.q_start, each.q_stop)
    k = within(keys, each.k_start, each.k_stop)
    if not q or not k:
        return
    if each.lo <= keys[k.start] - queries[q.stop - 1] and keys[k.stop - 1] - queries[q.start] <= each.hi:
        yield Slice(q.start, q.stop, k.start, k.stop)
        return
    alike = queries.step == keys.step
    for some in [k] if alike or len(q) == 1 else (range(place, place + 1) for place in k):
        step = keys.step if len(some) > 1 else queries.step
        # Key number b and query number a are `by + step * (b - a)` apart.
        by = keys[some.start] - queries[q.start] - step * (some.start - q.start)
        lo = -FAR if each.lo == -FAR else -((by - each.lo) // step)
        hi = FAR if each.hi == FAR else (each.hi - by) // step
        found = Slice(q.start, q.stop, some.start, some.stop, lo, hi).tight()
        if found is not None:
            yield found


def within(tokens: range, start: int, stop: int) -> range:
    """The places of those of some evenly spaced tokens that are in `start..stop-1`."""
    first = max(0, -((tokens.start - start) // tokens.step)) if tokens.start < start else 0
    last = min(len(tokens), -((tokens.start - stop) // tokens.step))
    return range(first, max(first, last))
