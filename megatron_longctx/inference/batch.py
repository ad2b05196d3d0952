"""The turns of several sequences, computed together: who has which new tokens, which keys, and what they see.

Queries are numbered by the new tokens, turn after turn; keys by the slots of all ranks' caches, rank after rank. So a
key block is a run of slots in place: nothing is gathered before a plan runs, and no length is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from ..errors import refuse
from ..layout import Layout
from ..schedules import Block, Document, Kind, Mask, Plan, Slice
from ..schedules.cache_modes import CACHE_MODES
from ..schedules.mask import FAR, band_between, runs
from ..schedules.visibility import Visibility
from .cache_manager import Turn


@dataclass(frozen=True)
class Batch:
    """Turns on `n` ranks with `slots` cache slots each.

    window: tokens before itself that a query sees; None for all.
    """

    n: int
    slots: int
    turns: tuple[Turn, ...]
    window: int | None = None

    @property
    def new(self) -> int:
        return sum(turn.new for turn in self.turns)

    @property
    def cached(self) -> int:
        return sum(turn.cached for turn in self.turns)

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the first row of every turn's new tokens, and the number of rows."""
        return tuple(tuple(accumulate((t.num_new(r) for t in self.turns), initial=0)) for r in range(self.n))

    def num_rows(self, rank: int) -> int:
        return self.rows[rank][-1]

    def last_row(self, index: int) -> tuple[int, int]:
        """(rank, row) of the last token of turn number `index`."""
        turn = self.turns[index]
        for rank in range(self.n):
            spans = turn.new_spans(rank)
            if spans and spans[-1].stop == turn.new:
                return rank, self.rows[rank][index + 1] - 1
        raise AssertionError("some rank holds the last token")

    @cached_property
    def queries(self) -> Layout:
        """Which rank has which of the new tokens."""
        spans = tuple(
            tuple(
                range(span.start + start, span.stop + start)
                for turn, start in zip(self.turns, self._starts, strict=False)
                for span in turn.new_spans(rank)
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
        slices = [each for index in range(len(self.turns)) for each in self._slices(index)]
        starts = zip(self.turns, self._starts, strict=False)
        documents = tuple(Document(start, start + turn.new, turn.cached) for turn, start in starts)
        return Mask(self.new, tuple(sorted(slices)), documents, "causal over a cache")

    @cached_property
    def key_blocks(self) -> tuple[tuple[Block, ...], ...]:
        """By rank, its keys that some turn has, turn after turn, in the order of positions; each once."""
        found = []
        for rank in range(self.n):
            spans = [(run.start, run.stop) for turn in self.turns for run in _all_runs(turn, rank)]
            edges = sorted({edge for span in spans for edge in span})
            shared = len(runs(spans)) < len(spans) and any(a[1] > b[0] for a, b in pairwise(sorted(spans)))
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
        """The first number of every turn's new tokens."""
        return tuple(accumulate((turn.new for turn in self.turns), initial=0))

    def _slices(self, index: int) -> Iterator[Slice]:
        """What the new tokens of a turn see of every rank's slots."""
        turn, first = self.turns[index], self._starts[index]
        queries = range(turn.cached, turn.cached + turn.new)
        before = FAR if self.window is None else self.window
        # In positions, which count from 0 in a sequence.
        seen = Slice(turn.cached, turn.cached + turn.new, 0, turn.cached + turn.new, -before, 0)
        for rank in range(self.n):
            base = rank * self.slots
            if self.window is None:
                for run in turn.cached_runs[rank]:
                    yield Slice(first, first + turn.new, base + run.start, base + run.stop)
                held = _matched(turn.new_runs[rank], _moved(turn.new_spans(rank), turn.cached))
            else:
                positions = [*turn.positions[rank], *_moved(turn.new_spans(rank), turn.cached)]
                held = _matched(_all_runs(turn, rank), positions)
            for slot, tokens in held:
                yield from (each.moved(first, base + slot) for each in band_between(seen, queries, tokens))


def _all_runs(turn: Turn, rank: int) -> list[range]:
    return [run for run in (*turn.cached_runs[rank], *turn.new_runs[rank]) if run]


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
