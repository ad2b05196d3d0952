"""Visibility between ranks: which queries of one rank see which keys of another. Every mode uses it."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..layout import Layout
from .mask import Mask
from .plan import Attend, Block, Kind
from .slices import Slice, band_between, indices_within, joined, merge_spans


class _SeenPart(NamedTuple):
    """Adjacent visible keys of a block and the slices that see them. whole: they are all keys of the block."""

    start: int
    stop: int
    whole: bool
    slices: list[Slice]


class _Call(NamedTuple):
    """An attention call on keys of any ranks. first, last: the range of its queries, without `last`. spans: for each
    span of its keys, the index of the block, the first and last slot, and whether it is the whole block."""

    first: int
    last: int
    spans: tuple[tuple[int, int, int, bool], ...]
    slices: tuple[Slice, ...]


class Visibility:
    """A mask over ranks: what queries of one rank see of the keys of another, in slots of each.

    Most pairs of many ranks see the same slices of each other, so equal tuples of slices are one object, and results
    are cached by the identity of these objects.

    queries, keys: their layouts; the same, except over a cache.
    all_keys: indexed by rank, one block of all its keys, or nothing for a rank without keys.
    """

    def __init__(self, mask: Mask, queries: Layout, keys: Layout) -> None:
        self.mask, self.queries, self.keys = mask, queries, keys
        sizes = map(keys.num_tokens, range(keys.n))
        self.all_keys = [[Block(Kind.KV, rank, 0, slots)] if slots else [] for rank, slots in enumerate(sizes)]
        self._between: dict[int, dict[int, tuple[Slice, ...]]] = {}
        self._joined: dict[tuple[Slice, ...], tuple[Slice, ...]] = {}
        self._query_blocks: dict[tuple[int, int, int], tuple[Block]] = {}
        self._calls: dict[tuple[tuple[int, int, int], ...], _Call | None] = {}
        self._parts: dict[tuple[int, int, int], list[_SeenPart]] = {}
        self._needed: dict[int, list[tuple[int, int]]] = {}
        held = [(rank, slot, span) for rank in range(keys.n) for slot, span in keys.slot_spans(rank)]
        held.sort(key=lambda each: each[2].start)
        # Spans of consecutive tokens do not overlap, so they can be bisected; strided spans are all searched.
        self._consecutive = [each for each in held if each[2].step == 1]
        self._stops = [span.stop for _, _, span in self._consecutive]
        self._strided = [each for each in held if each[2].step != 1]

    def between(self, q_rank: int, k_rank: int) -> tuple[Slice, ...]:
        """Return the slices in which queries of `q_rank` see keys of `k_rank`, each pair once."""
        if q_rank not in self._between:
            self._between[q_rank] = {rank: self._join(tuple(some)) for rank, some in self._seen_by(q_rank).items()}
        return self._between[q_rank].get(k_rank, ())

    def _join(self, slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
        if slices not in self._joined:
            self._joined[slices] = tuple(joined(slices))
        return self._joined[slices]

    def attend(self, q_rank: int, keys: Iterable[Block]) -> tuple[Attend, ...]:
        """Return the one call of all queries of `q_rank` that see any of `keys`; an empty tuple if none does.

        keys: blocks in the order in which they are stored. The call leaves out rows that none of the queries sees.
        """
        blocks = list(keys)
        between = [self.between(q_rank, key.home) for key in blocks]
        call_key = tuple([(id(seen), key.start, key.stop) for seen, key in zip(between, blocks, strict=True)])
        if call_key not in self._calls:
            for part_key, seen in zip(call_key, between, strict=True):
                if part_key not in self._parts:
                    self._parts[part_key] = _seen_parts(seen, *part_key[1:])
            self._calls[call_key] = _call([self._parts[part_key] for part_key in call_key])
        call = self._calls[call_key]
        if call is None:
            return ()
        query = q_rank, call.first, call.last
        if query not in self._query_blocks:
            self._query_blocks[query] = (Block(Kind.Q, *query),)
        spans = [
            blocks[i] if whole else Block(Kind.KV, blocks[i].home, start, stop) for i, start, stop, whole in call.spans
        ]
        return (Attend(self._query_blocks[query], tuple(spans), call.slices),)

    def needed(self, q_rank: int, k_rank: int) -> list[Block]:
        """Return the keys of one rank that any query of another sees."""
        seen = self.between(q_rank, k_rank)
        if id(seen) not in self._needed:
            self._needed[id(seen)] = merge_spans((each.k_start, each.k_stop) for each in seen)
        return [Block(Kind.KV, k_rank, start, stop) for start, stop in self._needed[id(seen)]]

    def first_query(self, q_rank: int, key: Block) -> int:
        """Return the first slot whose query sees any of a block of keys; the number of slots if none does."""
        seen = (_cut_keys(each, key.start, key.stop) for each in self.between(q_rank, key.home))
        return min((each.q_start for each in seen if each is not None), default=self.queries.num_tokens(q_rank))

    def in_query_order(self, q_rank: int, keys: Iterable[Block]) -> list[Block]:
        """Return blocks of keys in the order of the first queries that see them: what the same see is side by side."""
        return [key for _, key in sorted((self.first_query(q_rank, key), key) for key in keys)]

    def needed_per_hop(self, home: int, readers: Sequence[int], pieces: Sequence[Block]) -> list[list[Block]]:
        """Return the keys that travel on each hop from `home` to one reader after the other.

        These are the parts of `pieces` that the reader of the hop or any later reader sees.
        """
        slots = self.keys.num_tokens(home)
        hops: list[list[Block]] = [[] for _ in readers]
        spans: list[tuple[int, int]] = []
        blocks: list[Block] = []
        for hop in range(len(readers) - 1, -1, -1):
            seen = () if spans == [(0, slots)] else self.between(readers[hop], home)
            if seen:
                spans = merge_spans((*spans, *((each.k_start, each.k_stop) for each in seen)))
                blocks = [
                    piece._replace(start=max(start, piece.start), stop=min(stop, piece.stop))
                    for piece in pieces
                    for start, stop in spans
                    if start < piece.stop and piece.start < stop
                ]
            hops[hop] = blocks
        return hops

    def _seen_by(self, q_rank: int) -> dict[int, list[Slice]]:
        """Return the slices that the queries of a rank see, keyed by the rank of the keys."""
        seen_of: dict[int, list[Slice]] = {}
        for slot, span in self.queries.slot_spans(q_rank):
            for each in self.mask.slices_of(span.start, span[-1] + 1):
                near = each.cut(span.start, span[-1] + 1, each.k_start, each.k_stop)  # of a window few keys
                q = indices_within(span, each.q_start, each.q_stop)
                if near is None or not q:
                    continue
                # Keys that all of these queries see.
                start = max(each.k_start, span[q.stop - 1] + each.lo)
                stop = min(each.k_stop, span[q.start] + each.hi + 1)
                for rank, at, tokens in self._holding(near):
                    if start <= tokens.start and tokens[-1] < stop:
                        seen = [Slice(slot + q.start, slot + q.stop, at, at + len(tokens))]
                    else:
                        seen = [band.moved(slot, at) for band in band_between(each, span, tokens)]
                    if seen:
                        seen_of.setdefault(rank, []).extend(seen)
        return seen_of

    def _holding(self, each: Slice) -> Iterable[tuple[int, int, range]]:
        """Yield (rank, first slot, tokens) of the spans that may hold keys of a slice of tokens."""
        first = bisect_right(self._stops, each.k_start)
        for held in self._consecutive[first:]:
            if held[2].start >= each.k_stop:
                break
            yield held
        yield from self._strided


def _seen_parts(seen: Sequence[Slice], start: int, stop: int) -> list[_SeenPart]:
    """Return the parts of keys `start..stop-1` of a rank that `seen` sees."""
    slices = [piece for each in seen if (piece := _cut_keys(each, start, stop)) is not None]
    return [
        _SeenPart(low, high, (low, high) == (start, stop), [each for each in slices if low <= each.k_start < high])
        for low, high in merge_spans((each.k_start, each.k_stop) for each in slices)
    ]


def _call(blocks: Sequence[Sequence[_SeenPart]]) -> _Call | None:
    """Return the call on the visible parts of some blocks."""
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


def _cut_keys(each: Slice, start: int, stop: int) -> Slice | None:
    """Return the part of a slice with keys `start..stop-1`."""
    if start <= each.k_start and each.k_stop <= stop:
        return each
    return each.cut(each.q_start, each.q_stop, start, stop)


@lru_cache(maxsize=64)
def visibility(mask: Mask, layout: Layout) -> Visibility:
    """Return the cached visibility of a mask whose queries and keys have the same layout."""
    return Visibility(mask, layout, layout)
