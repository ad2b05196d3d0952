"""The chunks of several sequences, computed together: who has which new tokens, which keys, and what they see.

Queries are numbered by the new tokens, chunk after chunk; keys by the slots of all ranks' caches, rank after rank. So a
key block is a run of slots in place: nothing is gathered before a plan runs, and no length is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from ..errors import refuse
from ..layout import Layout
from ..schedules import Block, Document, Kind, Mask, Plan, Slice
from ..schedules.cache_modes import CACHE_MODES
from ..schedules.mask import FAR, band_between, merge_spans
from ..schedules.visibility import Visibility
from .cache_manager import ScheduledChunk


@dataclass(frozen=True)
class Batch:
    """Turns on `n` ranks with `slots` cache slots each.

    window: tokens before itself that a query sees; None for all.
    """

    n: int
    slots: int
    chunks: tuple[ScheduledChunk, ...]
    window: int | None = None

    @property
    def new(self) -> int:
        return sum(chunk.new for chunk in self.chunks)

    @property
    def cached(self) -> int:
        """Cached tokens that some new one sees."""
        most = FAR if self.window is None else self.window
        return sum(min(chunk.cached, most) for chunk in self.chunks)

    def within(self, window: int | None) -> Batch:
        """The same tokens, as layers with another window see them."""
        return self if window == self.window else replace(self, window=window)

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the first row of every chunk's new tokens, and the number of rows."""
        return tuple(tuple(accumulate((t.num_new(r) for t in self.chunks), initial=0)) for r in range(self.n))

    def num_rows(self, rank: int) -> int:
        return self.rows[rank][-1]

    def last_row(self, index: int) -> tuple[int, int]:
        """(rank, row) of the last token of chunk number `index`."""
        chunk = self.chunks[index]
        for rank in range(self.n):
            spans = chunk.new_spans(rank)
            if spans and spans[-1].stop == chunk.new:
                return rank, self.rows[rank][index + 1] - 1
        raise AssertionError("some rank holds the last token")

    @cached_property
    def queries(self) -> Layout:
        """Which rank has which of the new tokens."""
        spans = tuple(
            tuple(
                range(span.start + start, span.stop + start)
                for chunk, start in zip(self.chunks, self._starts, strict=False)
                for span in chunk.new_spans(rank)
            )
            for rank in range(self.n)
        )
        return Layout("new tokens", self.new, spans)

    @cached_property
    def keys(self) -> Layout:
        """Every rank's slots, whatever lies there."""
        size = self.slots
        return Layout("cache", self.n * size, tuple((range(r * size, (r + 1) * size),) for r in range(self.n)))

    @cached_property
    def mask(self) -> Mask:
        """What the new tokens see: all that is cached of their sequence, causally what is new of it."""
        slices = [each for index in range(len(self.chunks)) for each in self._slices(index)]
        starts = zip(self.chunks, self._starts, strict=False)
        documents = tuple(Document(start, start + chunk.new, chunk.cached) for chunk, start in starts)
        return Mask(self.new, tuple(sorted(slices)), documents, "causal over a cache")

    @cached_property
    def key_blocks(self) -> tuple[tuple[Block, ...], ...]:
        """By rank, its keys that some chunk has, chunk after chunk, in the order of positions; each once."""
        found = []
        for rank in range(self.n):
            spans = [(run.start, run.stop) for chunk in self.chunks for run in _all_runs(chunk, rank)]
            edges = sorted({edge for span in spans for edge in span})
            shared = len(merge_spans(spans)) < len(spans) and any(a[1] > b[0] for a, b in pairwise(sorted(spans)))
            cut = edges if shared else ()  # shared ones are then the same blocks of all that share them
            blocks = (piece for start, stop in spans for piece in _cut(Block(Kind.KV, rank, start, stop), cut))
            found.append(tuple(dict.fromkeys(blocks)))
        return tuple(found)

    def plan(self, mode: str) -> Plan:
        """The plan of a mode, made once.

        Raises:
            ValueError: an unknown mode.
        """
        if mode not in CACHE_MODES:
            raise refuse("inference.mode", mode, "one of " + ", ".join(CACHE_MODES), "Choose one of these.")
        if mode not in self._plans:
            self._plans[mode] = CACHE_MODES[mode](self._seen, self.key_blocks)
        return self._plans[mode]

    @cached_property
    def _plans(self) -> dict[str, Plan]:
        return {}

    @cached_property
    def _seen(self) -> Visibility:
        return Visibility(self.mask, self.queries, self.keys)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The first number of every chunk's new tokens."""
        return tuple(accumulate((chunk.new for chunk in self.chunks), initial=0))

    def _slices(self, index: int) -> Iterator[Slice]:
        """What the new tokens of a chunk see of every rank's slots."""
        chunk, first = self.chunks[index], self._starts[index]
        queries = range(chunk.cached, chunk.cached + chunk.new)
        before = FAR if self.window is None else self.window
        # In positions, which count from 0 in a sequence.
        seen = Slice(chunk.cached, chunk.cached + chunk.new, 0, chunk.cached + chunk.new, -before, 0)
        for rank in range(self.n):
            base = rank * self.slots
            if self.window is None:
                for run in chunk.cached_runs[rank]:
                    yield Slice(first, first + chunk.new, base + run.start, base + run.stop)
                held = _matched(chunk.new_runs[rank], _moved(chunk.new_spans(rank), chunk.cached))
            else:
                positions = [*chunk.positions[rank], *_moved(chunk.new_spans(rank), chunk.cached)]
                held = _matched(_all_runs(chunk, rank), positions)
            for slot, tokens in held:
                yield from (each.moved(first, base + slot) for each in band_between(seen, queries, tokens))


def _all_runs(chunk: ScheduledChunk, rank: int) -> list[range]:
    return [run for run in (*chunk.cached_runs[rank], *chunk.new_runs[rank]) if run]


def _moved(spans: Sequence[range], by: int) -> list[range]:
    return [range(span.start + by, span.stop + by) for span in spans]


def _matched(slots: Sequence[range], positions: Sequence[range]) -> Iterator[tuple[int, range]]:
    """Runs of slots and of positions, both cut where either ends: (first slot, positions)."""
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
    """The block in pieces that end at every edge within."""
    start = block.start
    for edge in edges:
        if start < edge < block.stop:
            yield block._replace(start=start, stop=edge)
            start = edge
    yield block._replace(start=start)
