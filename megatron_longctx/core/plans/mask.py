"""Masks as data: rectangles of queries and keys, each with a band of diagonals (`slices.Slice`).

A band means that query i sees key j if `lo <= j - i <= hi`. Full, causal, inverse causal and windows are four bands,
not four cases; documents, prefixes and shared-prefix trees are lists of rectangles. No code outside this file knows any
of them by name.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from ..errors import refuse
from .slices import FAR, Slice

Window = tuple[int | None, int | None]
"""The numbers of tokens that a query sees before and after itself, as Megatron's `window_size`; None for no bound."""


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

    @staticmethod
    def of(mask: Mask | int) -> Mask:
        """Return a mask as it is, and a causal one of a number of tokens; ValueError for anything else."""
        if not isinstance(mask, Mask | int):
            raise refuse("mask", mask, "a Mask, or an int, the tokens of a causal sequence", "Use Mask.documents.")
        return mask if isinstance(mask, Mask) else Mask.causal(mask)

    @staticmethod
    def causal(length: int, window: Window = (None, None)) -> Mask:
        """Return the mask in which token i sees tokens 0..i, or as many as a sliding window holds.

        Args:
            length: the number of tokens of the sequence.
            window: (w, 0) for the w tokens before a token and itself, as Megatron's `window_size`.

        Raises ValueError: a negative length or window.
        """
        return _one_document(length, tuple(window), causal=True)

    @staticmethod
    def full(length: int, window: Window = (None, None)) -> Mask:
        """Return the mask in which every token sees every token, or the `window` (before, after) around itself.

        Raises ValueError: a negative length or window.
        """
        return _one_document(length, tuple(window), causal=False)

    @staticmethod
    def packed(
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
        tokens of the query's own document. Positions count from 0 in a document without a parent; otherwise they
        continue after the parent's last token.

        Args:
            lengths: the number of tokens of each document.
            causal: False for documents whose tokens see each other in both directions. With `parents` that each name
                the previous document, this is a block-causal mask.
            window: the numbers of tokens (before, after) itself that a token sees at most; None for no bound. (w, 0) is
                a sliding window.
            prefixes: for each document, the number of its first tokens that all of its tokens see (prefix-LM).
            parents: for each document, the number of an earlier one that it continues, or -1: a tree of shared
                prefixes. Depth-first order needs the fewest kernel calls.

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
            raise refuse("prefixes", "given", "none with causal=False, where every token sees all", "Leave one out.")
        placed, slices = list[Document](), list[Slice]()
        for number, (length, stop) in enumerate(zip(lengths, ends, strict=True)):
            start, parent = stop - length, -1 if parents is None else parents[number]
            first = placed[parent].position + lengths[parent] if parent >= 0 else 0
            placed.append(Document(start, stop, first))
            seen: list[Slice | None] = []
            while parent >= 0:
                by = (placed[parent].start - placed[parent].position) - (start - first)
                lowest = -FAR if before == FAR else by - before
                seen.append(Slice(start, stop, placed[parent].start, placed[parent].stop, lowest).tight())
                parent = -1 if parents is None else parents[parent]
            prefix = 0 if prefixes is None else prefixes[number]
            seen.append(Slice(start, stop, start, start + prefix, -before, after).tight())
            highest = min(after, 0) if causal else after
            seen.append(Slice(start, stop, start + prefix, stop, -before, highest).tight())
            slices += sorted((each for each in seen if each is not None), key=lambda each: each.k_start)
        words = ["causal" if causal else "full", *[f"{len(lengths)} documents"] * (len(lengths) != 1)]
        words += [f"window {window[0]}, {window[1]}"] * (window != (None, None))
        words += ["prefixes"] * (prefixes is not None) + ["a tree"] * (parents is not None)
        return Mask(ends[-1] if ends else 0, tuple(slices), tuple(placed), ", ".join(words))

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

    def of_queries(self, spans: Iterable[tuple[int, int]]) -> Mask:
        """Return the mask in which queries outside of spans, which do not overlap, see nothing."""
        cut = (each.cut(*span, each.k_start, each.k_stop) for span in spans for each in self.slices_of(*span))
        return replace(self, slices=tuple(sorted(each for each in cut if each is not None)))

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
def _one_document(length: int, window: Window, causal: bool) -> Mask:
    if length < 0:
        raise refuse("length", length, "0 tokens or more", "Give the tokens of the whole sequence.")
    name = "causal" if causal else "full"
    return documents([length], causal=causal, window=window) if length else Mask(0, (), (), name)


causal, full, documents = Mask.causal, Mask.full, Mask.packed


def _check_each(name: str, values: Sequence[int] | None, ranges: Sequence[tuple[int, int]]) -> None:
    if values is None:
        return
    if len(values) != len(ranges):
        raise refuse(name, f"{len(values)} numbers", f"{len(ranges)}, one for each document", "Correct it.")
    for number, (value, (least, most)) in enumerate(zip(values, ranges, strict=True)):
        if not least <= value <= most:
            raise refuse(f"{name}[{number}]", value, f"{least} to {most}", "Correct it.")
