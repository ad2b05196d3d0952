"""Where the new tokens of a session go: which rank gets which of them, and begins which pages."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from .pages import Held

MAX_CONTIGUOUS = 512
"""The number of new tokens per rank up to which each rank gets one contiguous part.

The last rank then sees more of the new tokens than the first: at most `MAX_CONTIGUOUS` times `n * MAX_CONTIGUOUS / 2`
pairs more than the mean, or 0.03 ms in FlashAttention-2 with 32 heads of 128 on 4 H200s (330 TFLOP/s). Two parts per
rank need more kernel calls and merges for the same keys, and the host takes about 0.15 ms for each
(`schedules.Costs.of_cluster`): for 66 tokens over a long cache, 15 operations per layer instead of 9, with `one_hop` on
4 ranks."""


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
        return [page for page, _ in itertools.groupby(pages)]


def assign(held: Held, count: int, max_contiguous: int, first: int) -> tuple[list[list[range]], list[int]]:
    """Return every rank's part of `count` new tokens, and the ranks of the pages that they begin, in order: the larger
    parts for ranks that hold fewer pages of the session, among equal ones in the order from rank `first` on."""
    n, page_tokens = len(held.shards), held.shards[0].page_tokens
    parts: list[list[range]] = [[] for _ in range(n)]
    head = min(count, -held.tokens % page_tokens)  # goes into the last page
    if head:
        parts[held.pages[-1][0]].append(range(head))
    homes = [0] * -(-(count - head) // page_tokens)
    pieces = split_pages(n, len(homes), count <= max_contiguous * n)
    ranks = sorted(range(n), key=lambda r: (len(held.shards[r].pages), (r - first) % n))
    for rank, spans in zip(ranks, sorted(pieces, key=lambda spans: -sum(map(len, spans))), strict=True):
        for span in filter(None, spans):
            homes[span.start : span.stop] = [rank] * len(span)
            start, stop = (head + at * page_tokens for at in (span.start, span.stop))
            parts[rank].append(range(start, min(stop, count)))
    return parts, homes


@functools.lru_cache(maxsize=64)  # decode asks for the parts of a page, or of none, over and over
def split_pages(n: int, pages: int, few: bool) -> tuple[tuple[range, ...], ...]:
    """Cut new pages into n parts, whose sizes differ by at most one: contiguous for `few` tokens, otherwise zigzag,
    whose parts have equal causal work."""
    size, larger = divmod(pages, n if few else 2 * n)
    cuts = (i * size + min(i, larger) for i in range((n if few else 2 * n) + 1))
    pieces = [range(start, stop) for start, stop in itertools.pairwise(cuts)]
    return tuple((pieces[i],) if few else (pieces[i], pieces[-1 - i]) for i in range(n))
