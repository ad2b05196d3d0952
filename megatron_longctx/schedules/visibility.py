"""Which queries of one rank see which keys of another: the geometry that every mode shares."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..layout import Layout
from .mask import Mask, Slice, band_between, joined, runs, within
from .plan import Attend, Block, Kind


class _Held(NamedTuple):
    """Tokens of a rank, from one of its slots on."""

    rank: int
    slot: int
    tokens: range


class _Part(NamedTuple):
    """Neighbouring keys of a block that are seen, whether they are all of it, and what of them is seen."""

    start: int
    stop: int
    whole: bool
    slices: list[Slice]


class _Call(NamedTuple):
    """A call on keys of whatever ranks. first, last: of its queries, the last one excluded. spans: of its keys: the
    place of a block among those that are asked about, its first and last slot, and whether they are all of it."""

    first: int
    last: int
    spans: tuple[tuple[int, int, int, bool], ...]
    slices: tuple[Slice, ...]


class Visibility:
    """A mask over ranks: what queries of one rank see of the keys of another, in slots of each.

    Args:
        queries, keys: who holds which token; the same layout, but over a cache.
    """

    def __init__(self, mask: Mask, queries: Layout, keys: Layout) -> None:
        self.mask, self.queries, self.keys = mask, queries, keys
        self._found: dict[int, dict[int, tuple[Slice, ...]]] = {}
        # Of many ranks most see alike of each other.
        self._joined: dict[tuple[Slice, ...], tuple[Slice, ...]] = {}
        self._attended: dict[tuple[int, int, int], tuple[Block]] = {}
        # Alike slices are one object, so that a number says which.
        self._calls: dict[tuple[tuple[int, int, int], ...], _Call | None] = {}
        self._parts: dict[tuple[int, int, int], list[_Part]] = {}
        self._needed: dict[int, list[tuple[int, int]]] = {}
        held = sorted(
            (_Held(rank, slot, span) for rank in range(keys.n) for slot, span in keys.slot_spans(rank)),
            key=lambda each: each.tokens.start,
        )
        # Stretches of consecutive tokens follow each other; evenly spaced ones overlap and are looked through.
        self._stretches = [each for each in held if each.tokens.step == 1]
        self._ends = [each.tokens.stop for each in self._stretches]
        self._spaced = [each for each in held if each.tokens.step != 1]
        self._q_starts = [each.q_start for each in mask.slices]
        self._longest = max((each.num_queries for each in mask.slices), default=0)

    def between(self, q_rank: int, k_rank: int) -> tuple[Slice, ...]:
        """What the queries of `q_rank` see of the keys of `k_rank`, each pair once."""
        if q_rank not in self._found:
            self._found[q_rank] = {rank: self._join(tuple(found)) for rank, found in self._seen_by(q_rank).items()}
        return self._found[q_rank].get(k_rank, ())

    def _join(self, slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
        if slices not in self._joined:
            self._joined[slices] = tuple(joined(slices))
        return self._joined[slices]

    def attend(self, q_rank: int, keys: Iterable[Block]) -> Attend | None:
        """All that the queries of `q_rank` see of some blocks of keys, in one call; None where that is nothing.

        Args:
            keys: in the order in which they lie in memory. Rows that nobody here sees are left out.
        """
        blocks = list(keys)
        between = [self.between(q_rank, key.home) for key in blocks]
        asked = tuple([(id(seen), key.start, key.stop) for seen, key in zip(between, blocks, strict=True)])
        if asked not in self._calls:
            for part, seen in zip(asked, between, strict=True):
                if part not in self._parts:
                    self._parts[part] = _parts(seen, *part[1:])
            self._calls[asked] = _call([self._parts[part] for part in asked])
        call = self._calls[asked]
        if call is None:
            return None
        query = q_rank, call.first, call.last
        if query not in self._attended:
            self._attended[query] = (Block(Kind.Q, *query),)
        spans = [
            blocks[i] if whole else Block(Kind.KV, blocks[i].home, start, stop) for i, start, stop, whole in call.spans
        ]
        return Attend(self._attended[query], tuple(spans), call.slices)

    def attend_all(self, q_rank: int, k_rank: int) -> tuple[Attend, ...]:
        """All queries of one rank against all keys of another: one call, or none."""
        slots = self.keys.num_tokens(k_rank)
        found = self.attend(q_rank, [Block(Kind.KV, k_rank, 0, slots)] if slots else [])
        return () if found is None else (found,)

    def all_keys(self) -> list[list[Block]]:
        """By rank, a block of all its keys."""
        sizes = map(self.keys.num_tokens, range(self.keys.n))
        return [[Block(Kind.KV, rank, 0, slots)] if slots else [] for rank, slots in enumerate(sizes)]

    def needed(self, q_rank: int, k_rank: int) -> list[Block]:
        """The keys of one rank that queries of another see any of."""
        seen = self.between(q_rank, k_rank)
        if id(seen) not in self._needed:
            self._needed[id(seen)] = runs((each.k_start, each.k_stop) for each in seen)
        return [Block(Kind.KV, k_rank, start, stop) for start, stop in self._needed[id(seen)]]

    def first_query(self, q_rank: int, key: Block) -> int:
        """The first slot of a rank whose query sees any of a block of keys; the number of its slots if none does."""
        found = (_rows(each, key.start, key.stop) for each in self.between(q_rank, key.home))
        return min((each.q_start for each in found if each is not None), default=self.queries.num_tokens(q_rank))

    def _seen_by(self, q_rank: int) -> dict[int, list[Slice]]:
        found: dict[int, list[Slice]] = {}
        for slot, span in self.queries.slot_spans(q_rank):
            first = bisect_left(self._q_starts, span.start - self._longest + 1)
            for number in range(first, bisect_right(self._q_starts, span[-1])):
                each = self.mask.slices[number]
                near = each.cut(span.start, span[-1] + 1, each.k_start, each.k_stop)  # of a window few keys
                q = within(span, each.q_start, each.q_stop)
                if near is None or not q:
                    continue
                # Keys that all of these queries see.
                start, stop = (
                    max(each.k_start, span[q.stop - 1] + each.lo),
                    min(each.k_stop, span[q.start] + each.hi + 1),
                )
                for rank, at, tokens in self._holding(near):
                    if start <= tokens.start and tokens[-1] < stop:
                        seen = [Slice(slot + q.start, slot + q.stop, at, at + len(tokens))]
                    else:
                        seen = [band.moved(slot, at) for band in band_between(each, span, tokens)]
                    if seen:
                        found.setdefault(rank, []).extend(seen)
        return found

    def _holding(self, each: Slice) -> Iterable[_Held]:
        """Who holds keys of a slice of tokens."""
        first = bisect_right(self._ends, each.k_start)
        for held in self._stretches[first:]:
            if held.tokens.start >= each.k_stop:
                break
            yield held
        yield from self._spaced


def _parts(seen: Sequence[Slice], start: int, stop: int) -> list[_Part]:
    """What is seen of keys `start..stop-1` of a rank."""
    slices = [found for each in seen if (found := _rows(each, start, stop)) is not None]
    return [
        _Part(low, high, (low, high) == (start, stop), [each for each in slices if low <= each.k_start < high])
        for low, high in runs((each.k_start, each.k_stop) for each in slices)
    ]


def _call(blocks: Sequence[Sequence[_Part]]) -> _Call | None:
    """The call on some blocks of keys. blocks: what is seen of each."""
    spans: list[tuple[int, int, int, bool]] = []
    slices: list[Slice] = []
    at = 0
    for number, parts in enumerate(blocks):
        for start, stop, whole, seen in parts:
            spans.append((number, start, stop, whole))
            slices += [each.moved(0, at - start) for each in seen]
            at += stop - start
    if not slices:
        return None
    first, last = min(each.q_start for each in slices), max(each.q_stop for each in slices)
    if first:
        slices = [each.moved(-first, 0) for each in slices]
    return _Call(first, last, tuple(spans), tuple(joined(slices)))


def _rows(each: Slice, start: int, stop: int) -> Slice | None:
    """What of a slice has keys `start..stop-1`."""
    if start <= each.k_start and each.k_stop <= stop:
        return each
    return each.cut(each.q_start, each.q_stop, start, stop)


def needed_on(seen: Visibility, home: int, readers: Sequence[int], pieces: Sequence[Block]) -> list[list[Block]]:
    """What of some of a rank's keys leaves for each of the readers, one after the other: what that one and all behind
    it see."""
    slots = seen.keys.num_tokens(home)
    found: list[list[Block]] = [[] for _ in readers]
    spans: list[tuple[int, int]] = []
    blocks: list[Block] = []
    for hop in range(len(readers) - 1, -1, -1):
        if spans != [(0, slots)]:
            more = [(each.k_start, each.k_stop) for each in seen.between(readers[hop], home)]
            if more:
                spans = runs((*spans, *more))
                blocks = [
                    piece._replace(start=max(start, piece.start), stop=min(stop, piece.stop))
                    for piece in pieces
                    for start, stop in spans
                    if start < piece.stop and piece.start < stop
                ]
        found[hop] = blocks
    return found


@lru_cache(maxsize=64)
def visibility(mask: Mask, layout: Layout) -> Visibility:
    """Of queries and keys in the same layout; worked out once."""
    return Visibility(mask, layout, layout)
