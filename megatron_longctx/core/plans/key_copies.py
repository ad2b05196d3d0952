"""Copies of the keys that branches of a tree share, so that fewer kernel calls take all branches.

The segments of a call overlap neither in queries nor in keys, so keys that several branches see take several calls,
whose results are merged. With its own copy of the keys, a branch is one segment: its ancestors' keys before its own.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from .kernel_calls import KernelCall, KernelSupport, kernel_calls
from .plan import Heads, Kind
from .slices import Slice
from .workload import Workload

CALL_BYTES = 1 << 26
"""The bytes that a GPU copies while a kernel call starts and ends, about 20 us."""


class Span(NamedTuple):
    """Rows `start..start+tokens-1` of keys."""

    start: int
    tokens: int


class KeyCopies(NamedTuple):
    """spans: the rows of keys that are copied, one span behind the other. slices: which copies the queries see."""

    spans: tuple[Span, ...]
    slices: tuple[Slice, ...]


@lru_cache(maxsize=4096)
def key_copies(
    slices: tuple[Slice, ...], takes: KernelSupport, work: Workload, heads: Heads, backward: bool
) -> KeyCopies | None:
    """Return the copies that let fewer kernel calls compute `slices`, or None if they would move more bytes than they
    save.

    A call reads its queries, and its results are written and read again to be merged. A copy is read and written.
    """
    of = [work.token_bytes(kind, heads) for kind in (Kind.KV, Kind.DKV, Kind.Q, Kind.OUT, Kind.Q_GRAD, Kind.DQ)]
    of_copy, of_key = 2 * of[0], 2 * of[1] * backward
    of_query = of[4] + 2 * of[5] if backward else of[2] + 2 * of[3]

    def moved(calls: Iterable[KernelCall]) -> int:
        rows = [(each.q_span[1] - each.q_span[0], each.k_span[1] - each.k_span[0]) for each in calls]
        return sum(CALL_BYTES + queries * of_query + keys * of_key for queries, keys in rows)

    copies = _of_branches(slices)
    apart, together = kernel_calls(slices, takes), kernel_calls(copies.slices, takes)
    extra = of_copy * sum(tokens for _, tokens in copies.spans)
    pays = len(together) < len(apart) and moved(together) + extra < moved(apart)
    return copies if pays else None


def _of_branches(slices: Iterable[Slice]) -> KeyCopies:
    """Return a copy of the keys for each run of queries that are in the same slices. Keys that all see come first."""
    waiting = sorted(slices, key=lambda each: -each.q_start)
    ends = sorted({row for each in waiting for row in each[:2]})
    seen: list[Slice] = []
    spans: list[Span] = []
    found: list[Slice] = []
    at = 0
    for start, stop in pairwise(ends):
        while waiting and waiting[-1].q_start <= start:
            seen.append(waiting.pop())
        seen = [each for each in seen if each.q_stop > start]
        parts = [part for each in seen if (part := each.cut(start, stop, each.k_start, each.k_stop)) is not None]
        for part in sorted(parts, key=lambda part: (not part.is_full, part.k_start)):
            start = spans.pop().start if spans and sum(spans[-1]) == part.k_start else part.k_start
            spans.append(Span(start, part.k_stop - start))
            found.append(part.moved(0, at - part.k_start))
            at += part.num_keys
    return KeyCopies(tuple(spans), tuple(found))
