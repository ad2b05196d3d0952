"""Where the new tokens of sequences go, and batches of them, as queries, keys and a mask that cache modes plan over.

Queries are numbered by new token, chunk after chunk; keys by the slots of all ranks' caches, rank after rank. A key
block is therefore a range of slots in place: nothing is gathered before a plan runs, and no length is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise

from ..core.errors import refuse
from ..core.layout import Layout
from ..core.plans import Block, Document, Kind, Mask, Plan, Slice
from ..core.plans.cache_modes import CACHE_MODES
from ..core.plans.slices import FAR, band_between
from ..core.plans.visibility import Visibility
from .pages import Held

MAX_CONTIGUOUS = 512
"""The number of new tokens per rank up to which each rank gets one contiguous part.

Two parts per rank need more kernel calls and merges for the same keys, and the host takes about 0.15 ms for each. The
last rank then sees more of the new tokens than the first: up to 0.03 ms in FlashAttention-2 with 32 heads of 128."""


@dataclass(frozen=True)
class ScheduledChunk:
    """New tokens of one session, with their places in the cache.

    Attributes:
        cached: the number of tokens cached before, at positions `0..cached-1`; the new tokens follow.
        new: the number of new tokens.
        new_spans: per rank, its new tokens, counted from 0.
        cached_slots, new_slots: per rank, the slots of its cached and of its new tokens, in the order of positions.
        cached_positions: per rank, the positions of its cached tokens, in the order of `cached_slots`.
        windowed: the same tokens in layers with windows, with the cached ones that these keep; None if all layers have
            the same pages.
    """

    session: int
    cached: int
    new: int
    new_spans: tuple[tuple[range, ...], ...]
    cached_slots: tuple[tuple[range, ...], ...]
    new_slots: tuple[tuple[range, ...], ...]
    cached_positions: tuple[tuple[range, ...], ...]
    windowed: ScheduledChunk | None = None

    def num_new(self, rank: int) -> int:
        return sum(map(len, self.new_spans[rank]))

    def new_positions(self, rank: int) -> list[range]:
        return [range(span.start + self.cached, span.stop + self.cached) for span in self.new_spans[rank]]

    def pages(self, rank: int, page_tokens: int) -> list[int]:
        """Return the pages of the slots on a rank, in the order of positions."""
        runs = *self.cached_slots[rank], *self.new_slots[rank]
        pages = (page for run in runs for page in range(run.start // page_tokens, -(-run.stop // page_tokens)))
        return [page for page, _ in groupby(pages)]


@dataclass(frozen=True)
class Batch:
    """Chunks that `n` ranks with `slots` cache slots each compute together.

    Attributes:
        window: tokens before itself that a query sees; None for all.
        windowed_slots: of each rank in layers with windows; None for the same ones.
    """

    n: int
    slots: int
    chunks: tuple[ScheduledChunk, ...]
    window: int | None = None
    windowed_slots: int | None = None

    @property
    def new(self) -> int:
        """The number of new tokens."""
        return sum(chunk.new for chunk in self.chunks)

    @property
    def cached(self) -> int:
        """The number of cached tokens that some new token sees."""
        most = FAR if self.window is None else self.window
        return sum(min(chunk.cached, most) for chunk in self.chunks)

    def with_window(self, window: int | None) -> Batch:
        """Return the batch, which has no window, as layers with one see it."""
        if window not in self._windowed:
            slots = self.slots if self.windowed_slots is None else self.windowed_slots
            chunks = tuple(chunk.windowed or chunk for chunk in self.chunks)
            self._windowed[window] = Batch(self.n, slots, chunks, window)
        return self._windowed[window]

    @cached_property
    def row_starts(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the first row of every chunk's new tokens, followed by the number of rows."""
        return tuple(tuple(accumulate((c.num_new(rank) for c in self.chunks), initial=0)) for rank in range(self.n))

    def num_rows(self, rank: int) -> int:
        return self.row_starts[rank][-1]

    def last_row(self, index: int) -> tuple[int, int]:
        """Return (rank, row) of the last token of chunk number `index`."""
        chunk = self.chunks[index]
        for rank, spans in enumerate(chunk.new_spans):
            if spans and spans[-1].stop == chunk.new:
                return rank, self.row_starts[rank][index + 1] - 1
        raise AssertionError("some rank has the last token")

    @cached_property
    def queries(self) -> Layout:
        """The new tokens of every rank."""
        spans = tuple(
            tuple(
                range(span.start + start, span.stop + start)
                for chunk, start in zip(self.chunks, self._starts, strict=False)
                for span in chunk.new_spans[rank]
            )
            for rank in range(self.n)
        )
        return Layout("new tokens", self.new, spans)

    @cached_property
    def keys(self) -> Layout:
        """The slots of every rank, used or not."""
        size = self.slots
        return Layout("cache", self.n * size, tuple((range(r * size, (r + 1) * size),) for r in range(self.n)))

    @cached_property
    def mask(self) -> Mask:
        """The slots that new tokens see: all cached tokens of their sequence, and its new tokens causally."""
        slices = [each for index in range(len(self.chunks)) for each in self._slices(index)]
        starts = zip(self.chunks, self._starts, strict=False)
        documents = tuple(Document(start, start + chunk.new, chunk.cached) for chunk, start in starts)
        return Mask(self.new, tuple(sorted(slices)), documents, "causal over a cache")

    @cached_property
    def key_blocks(self) -> tuple[tuple[Block, ...], ...]:
        """Per rank, the blocks of keys that the chunks use, chunk after chunk in the order of positions; each once."""
        blocks_of_ranks = []
        for rank in range(self.n):
            spans = [(run.start, run.stop) for chunk in self.chunks for run in _slots(chunk, rank)]
            overlapping = any(a[1] > b[0] for a, b in pairwise(sorted(spans)))
            # Cut where any chunk's keys begin or end, so that chunks that share keys use the same blocks.
            edges = sorted({edge for span in spans for edge in span}) if overlapping else ()
            blocks = (piece for start, stop in spans for piece in _cut(Block(Kind.KV, rank, start, stop), edges))
            blocks_of_ranks.append(tuple(dict.fromkeys(blocks)))
        return tuple(blocks_of_ranks)

    def plan(self, mode: str) -> Plan:
        """Return the plan of a mode, computed once. Raises ValueError: the mode is unknown."""
        if mode not in CACHE_MODES:
            raise refuse("inference.mode", mode, "one of " + ", ".join(CACHE_MODES), "Choose one of these.")
        if mode not in self._plans:
            self._plans[mode] = CACHE_MODES[mode](self._visibility, self.key_blocks)
        return self._plans[mode]

    @cached_property
    def _windowed(self) -> dict[int | None, Batch]:
        return {self.window: self}

    @cached_property
    def _plans(self) -> dict[str, Plan]:
        return {}

    @cached_property
    def _visibility(self) -> Visibility:
        return Visibility(self.mask, self.queries, self.keys)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The number of every chunk's first new token."""
        return tuple(accumulate((chunk.new for chunk in self.chunks), initial=0))

    def _slices(self, index: int) -> Iterator[Slice]:
        """Yield the slots of every rank that the new tokens of a chunk see."""
        chunk, first = self.chunks[index], self._starts[index]
        queries = range(chunk.cached, chunk.cached + chunk.new)
        before = FAR if self.window is None else self.window
        # In positions, which count from 0 in a sequence.
        seen = Slice(queries.start, queries.stop, 0, queries.stop, -before, 0)
        for rank in range(self.n):
            base = rank * self.slots
            slots, positions = chunk.new_slots[rank], chunk.new_positions(rank)
            if self.window is None:
                for run in chunk.cached_slots[rank]:
                    yield Slice(first, first + chunk.new, base + run.start, base + run.stop)
            else:
                slots, positions = _slots(chunk, rank), [*chunk.cached_positions[rank], *positions]
            for slot, tokens in _pair(slots, positions):
                yield from (each.moved(first, base + slot) for each in band_between(seen, queries, tokens))


def _slots(chunk: ScheduledChunk, rank: int) -> tuple[range, ...]:
    return (*chunk.cached_slots[rank], *chunk.new_slots[rank])


def _pair(slots: Sequence[range], positions: Sequence[range]) -> Iterator[tuple[int, range]]:
    """Yield (first slot, positions) of runs of slots and positions, both cut where either ends."""
    coming = iter(slots)
    left = range(0)
    for span in positions:
        while span:
            if not left:
                left = next(coming)
            size = min(len(left), len(span))
            yield left.start, span[:size]
            left, span = left[size:], span[size:]


def _cut(block: Block, edges: Sequence[int]) -> Iterator[Block]:
    """Yield the block in pieces that end at every edge inside it."""
    start = block.start
    for edge in edges:
        if start < edge < block.stop:
            yield block._replace(start=start, stop=edge)
            start = edge
    yield block._replace(start=start)


def assign(held: Held, count: int, max_contiguous: int, first: int) -> tuple[list[list[range]], list[int]]:
    """Return every rank's part of `count` new tokens, and the ranks of the pages that they begin, in order: the larger
    parts for ranks that hold fewer pages of the session, among equal ones in the order from rank `first` on."""
    n, page_tokens = len(held.shards), held.shards[0].page_tokens
    parts: list[list[range]] = [[] for _ in range(n)]
    head = min(count, -held.tokens % page_tokens)  # goes into the last page
    if head:
        parts[held.pages[-1][0]].append(range(head))
    if head == count:  # as in most steps of decode
        return parts, []
    homes = [0] * -(-(count - head) // page_tokens)
    pieces = split_pages(n, len(homes), count <= max_contiguous * n)
    ranks = sorted(range(n), key=lambda r: (len(held.shards[r].pages), (r - first) % n))
    for rank, spans in zip(ranks, sorted(pieces, key=lambda spans: -sum(map(len, spans))), strict=True):
        for span in filter(None, spans):
            homes[span.start : span.stop] = [rank] * len(span)
            start, stop = (head + at * page_tokens for at in (span.start, span.stop))
            parts[rank].append(range(start, min(stop, count)))
    return parts, homes


@lru_cache(maxsize=64)  # decode asks for the parts of a page, or of none, over and over
def split_pages(n: int, pages: int, few: bool) -> tuple[tuple[range, ...], ...]:
    """Cut new pages into n parts, whose sizes differ by at most one: contiguous for `few` tokens, otherwise zigzag,
    whose parts have equal causal work."""
    size, larger = divmod(pages, n if few else 2 * n)
    cuts = (i * size + min(i, larger) for i in range((n if few else 2 * n) + 1))
    pieces = [range(start, stop) for start, stop in pairwise(cuts)]
    return tuple((pieces[i],) if few else (pieces[i], pieces[-1 - i]) for i in range(n))
