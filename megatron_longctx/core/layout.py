"""Layouts: which rank holds which token. Pure functions over integers, without process groups and devices.

`build_layout("zigzag", n, length)` returns a `Layout`. `balanced` lays out several documents and gives all ranks equal
tokens and equal causal work. To add a layout, write a function that returns the spans of every rank and enter it in
`LAYOUTS`.

Every layout works for any number of ranks and any length. `unit` makes every span a multiple of that many tokens. Use
the tensor-parallel size with sequence parallelism, which splits each rank's tokens once more; 1 allows any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import nearest


@dataclass(frozen=True)
class Layout:
    """An assignment of the tokens `0 .. length-1` of one sequence to ranks and slots.

    `spans[rank]` lists token ranges of that rank. They are ascending, and the rank's slots (positions in its local
    tensors) number these tokens in the same order. Ranges may be empty, so no divisibility is required.
    """

    name: str
    length: int
    spans: tuple[tuple[range, ...], ...]

    @property
    def n(self) -> int:
        """The number of ranks."""
        return len(self.spans)

    def num_tokens(self, rank: int) -> int:
        """Return the number of local tokens of `rank`."""
        return self._sizes[rank]

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(sum(map(len, spans)) for spans in self.spans)

    def slot_spans(self, rank: int) -> Iterator[tuple[int, range]]:
        """Yield (first slot, tokens) of every nonempty span of `rank`."""
        starts = accumulate(map(len, self.spans[rank]), initial=0)
        return ((start, span) for start, span in zip(starts, self.spans[rank], strict=False) if span)

    def tokens(self, rank: int) -> Iterator[int]:
        """Return the global positions of the local tokens of `rank`, in slot order."""
        return chain.from_iterable(self.spans[rank])


def _cuts(length: int, pieces: int, unit: int) -> list[int]:
    """Return the `pieces + 1` boundaries of pieces whose sizes differ by at most one unit."""
    units = length // unit
    return [units * i // pieces * unit for i in range(pieces + 1)]


def contiguous(n: int, length: int, unit: int = 1) -> Layout:
    """Give rank r the r-th of n equal pieces."""
    cut = _cuts(length, n, unit)
    return Layout("contiguous", length, tuple((range(cut[r], cut[r + 1]),) for r in range(n)))


def zigzag(n: int, length: int, unit: int = 1) -> Layout:
    """Give rank r pieces r and 2n-1-r of 2n ("head-tail"), so that every rank has equal causal work."""
    cut = _cuts(length, 2 * n, unit)
    pieces = [range(cut[i], cut[i + 1]) for i in range(2 * n)]
    return Layout("zigzag", length, tuple((pieces[r], pieces[2 * n - 1 - r]) for r in range(n)))


def striped(n: int, length: int, unit: int = 1) -> Layout:
    """Give token t to rank t mod n (Striped Attention); refuse a `unit` that does not divide each rank's tokens."""
    if unit > 1 and length % (n * unit):
        step = n * unit
        raise ValueError(
            f"length {length}: the striped layout over {n} ranks with shares in units of {unit} needs a multiple of "
            f"{step}. Nearest: {nearest(length, step)}; or use zigzag."
        )
    return Layout("striped", length, tuple((range(r, length, n),) for r in range(n)))


def per_document(n: int, length: int, unit: int = 1, documents: Iterable[tuple[int, int, int]] | None = None) -> Layout:
    """Lay out every document (see `balanced`) in zigzag over all ranks, as TransformerEngine and Megatron-Core do with
    packs.

    Every rank has work on every document, so all documents travel; `balanced` keeps short ones whole.

    Raises ValueError: a document's length is not a multiple of `unit` > 1.
    """
    spans: list[list[range]] = [[] for _ in range(n)]
    for start, stop, _ in [(0, length, 0)] if documents is None else documents:
        if (stop - start) % unit:
            raise ValueError(
                f"document of {stop - start} tokens: the per_document layout with shares in units of {unit} needs a "
                f"multiple of {unit}. Pad the documents, or use balanced."
            )
        cut = [start + at for at in _cuts(stop - start, 2 * n, unit)]
        for rank, mine in enumerate(spans):
            for piece in (rank, 2 * n - 1 - rank):
                mine.append(range(cut[piece], cut[piece + 1]))
    return Layout("per_document", length, tuple(tuple(filter(len, mine)) for mine in spans))


SLACK = 0.005
"""The share of its tokens and of its work by which a rank may miss its target so that documents stay whole. The next
rank compensates, so no rank is off by more than twice this."""


def balanced(n: int, length: int, unit: int = 1, documents: Iterable[tuple[int, int, int]] | None = None) -> Layout:
    """Give every rank equal tokens and equal causal work, and keep most documents whole.

    The work of a token is its position in its document, which is the number of keys that it sees. Arrange the documents
    in a circle, the longest first, and slide a window of a fixed number of tokens around it. The work in the window
    changes without jumps, so at some place it equals the average. A rank takes the window at that place, which shares
    at most the two documents at its ends with other ranks. The remaining tokens have the same averages, so the next
    rank finds such a window, too. The balance is exact for every pack and for every weighting of tokens against pairs:
    attention's time, a whole layer's time, memory. A single document becomes nested pairs of pieces, as in zigzag.

    documents: (first token, token after the last, position of the first) of each; together they are the sequence.
        None for one document of all tokens.
    """
    left = [_Piece(*each) for each in ([(0, length, 0)] if documents is None else documents)]
    tokens, work = length, sum(each.work for each in left)
    slack = SLACK * length / n, SLACK * work / n
    work_left = work
    spans = []
    for later in range(n - 1, -1, -1):  # ranks after this one
        target = tokens - length // unit * later // n * unit
        mine = [] if later else left
        if later and target > 0:
            mine, left = _Circle(left, slack, unit).take(target, work_left - work * later / n)
        tokens, work_left = tokens - sum(each.tokens for each in mine), work_left - sum(each.work for each in mine)
        spans.append(_merged(mine))
    return Layout("balanced", length, tuple(spans))


class _Piece(NamedTuple):
    """Tokens `start..stop-1` of the sequence, at positions from `position` on: a document or a part of one."""

    start: int
    stop: int
    position: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def density(self) -> int:
        """Twice the average work of a token."""
        return 2 * self.position + self.tokens

    @property
    def work(self) -> int:
        return self.tokens * self.density

    def split(self, tokens: int) -> tuple[_Piece, _Piece]:
        """Split off the first `tokens` tokens."""
        start, stop, position = self
        middle = start + tokens
        return _Piece(start, middle, position), _Piece(middle, stop, position + tokens)


class _Circle:
    """Pieces in a circle, those with the highest positions first. Places count its tokens, twice around.

    slack: the (tokens, work) by which a window may miss its target if it consists of whole pieces.
    """

    def __init__(self, pieces: Iterable[_Piece], slack: tuple[float, float], unit: int) -> None:
        self.pieces, self.slack, self.unit = sorted(pieces, key=lambda each: (-each.density, each.start)), slack, unit
        tokens, work, position = np.array([(each.tokens, each.work, each.position) for each in self.pieces]).T
        self.places = np.append(0, np.tile(tokens, 2).cumsum())
        self.work = np.append(0, np.tile(work, 2).cumsum())
        self.position = np.tile(position, 2)
        self.tokens = int(tokens.sum())

    def take(self, tokens: int, work: float) -> tuple[list[_Piece], list[_Piece]]:
        """Return the pieces of a window of about `tokens` tokens and `work`, and the remaining pieces."""
        start, count = self._find(tokens, work)
        number = int(np.searchsorted(self.places, start, "right")) - 1
        before, first = self.pieces[number].split(start - int(self.places[number]))
        left = [first, *self.pieces[number + 1 :], *self.pieces[:number], before]
        taken: list[_Piece] = []
        while count:
            each, rest = left[0].split(min(count, left[0].tokens))
            left[:1] = [rest] if rest.tokens else []
            taken.append(each)
            count -= each.tokens
        return taken, left if before.tokens else left[:-1]

    def _find(self, tokens: int, work: float) -> tuple[int, int]:
        """Return the first place and the number of tokens of a window near the target.

        Prefer a window of whole pieces, then one that cuts a piece at one end, then one that cuts at both ends. If none
        is exact, return the closest. Of equal windows return the first, which cuts the longest documents.
        """
        bounds = self.places[: len(self.pieces)]
        after = np.searchsorted(self.places, bounds + tokens)
        for ends in (after, after - 1):
            more = self.places[ends] - bounds - tokens
            off = self.work[ends] - self.work[: len(bounds)] - work
            fits = (abs(more) <= self.slack[0]) & (abs(off) <= self.slack[1]) & (more % self.unit == 0)
            for number in np.flatnonzero(fits)[:1]:
                return int(bounds[number]), tokens + int(more[number])
        starts = np.unique(np.append(bounds, (bounds - tokens) % self.tokens))
        off = self._work_before(starts + tokens) - self._work_before(starts) - work
        near, (changes,) = np.flatnonzero(abs(off) <= self.slack[1]), np.nonzero(off * np.roll(off, -1) < 0)
        if len(near) or not len(changes):
            return int(starts[near[0] if len(near) else abs(off).argmin()]), tokens
        number = changes[0]  # between this start and the next one the work changes linearly
        following = (number + 1) % len(starts)
        distance = (starts[following] - starts[number]) % self.tokens
        shift = round(distance * off[number] / (off[number] - off[following]))
        return int(starts[number] + shift) % self.tokens, tokens

    def _work_before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        number = np.searchsorted(self.places[:-1], places, "right") - 1
        tokens = places - self.places[number]
        work: NDArray[np.int64] = self.work[number] + tokens * (2 * self.position[number] + tokens)
        return work


def _merged(pieces: Iterable[_Piece]) -> tuple[range, ...]:
    """Return the tokens of `pieces` as ascending ranges, with adjacent ones merged."""
    spans: list[range] = []
    for each in sorted(pieces):
        if spans and spans[-1].stop == each.start:
            spans[-1] = range(spans[-1].start, each.stop)
        else:
            spans.append(range(each.start, each.stop))
    return tuple(spans)


_ALL: tuple[Callable[..., Layout], ...] = (contiguous, zigzag, striped, balanced, per_document)
LAYOUTS = {each.__name__: each for each in _ALL}


def build_layout(
    name: str, n: int, length: int, unit: int = 1, documents: Iterable[tuple[int, int, int]] | None = None
) -> Layout:
    """Return the layout `name` for `n` ranks and `length` tokens. `documents` are those of `balanced`.

    Raises ValueError: unknown name, `n` < 1, negative length, or a length that is not a multiple of `unit`.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r}: expected one of {', '.join(LAYOUTS)}. Choose one of these.")
    if n < 1:
        raise ValueError(f"n={n}: expected at least 1 rank. Set a positive context-parallel size.")
    if length < 0:
        raise ValueError(f"length={length}: expected 0 tokens or more. Give the global sequence length.")
    if unit < 1 or length % unit:
        raise ValueError(
            f"length={length}: expected a multiple of unit={unit} (the tensor-parallel size, under sequence "
            f"parallelism). Pad the sequence or turn sequence parallelism off."
        )
    return LAYOUTS[name](n, length, unit, *([documents] if name in ("balanced", "per_document") else []))
