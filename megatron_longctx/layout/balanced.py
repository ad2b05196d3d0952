"""The layout of packs: every rank has as many tokens and as much causal work, and most documents stay whole.

A token's work is its position in its document: the keys that it sees. Lay documents in a circle, the longest first, and
move a stretch of so many tokens around it: the work within changes without jumps, so somewhere it is what it is on
average. A rank takes such a stretch, which shares at most the two documents at its ends with other ranks; what is left
has the same averages, so the next rank finds one, too. The balance is exact for every pack, and for every weight of
tokens against pairs: attention's time, a whole layer's, memory. One document of everything becomes nested pairs of
pieces, as in zigzag.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .layout import Layout

SLACK = 0.005
"""How far from its share, in tokens and in work, a rank may be so that documents stay whole. The next one makes up for
it: none is further off than twice this."""


class _Extent(NamedTuple):
    """Tokens `start..stop-1` of the sequence, at positions from `position` on: a document, or what is left of one."""

    start: int
    stop: int
    position: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def density(self) -> int:
        """Twice the work of its tokens, on average."""
        return 2 * self.position + self.tokens

    @property
    def work(self) -> int:
        return self.tokens * self.density

    def split(self, tokens: int) -> tuple[_Extent, _Extent]:
        """Its first tokens, and the others."""
        start, stop, position = self
        middle = start + tokens
        return _Extent(start, middle, position), _Extent(middle, stop, position + tokens)


class _Share(NamedTuple):
    """What a rank is to have, and how far off it may be."""

    tokens: int
    work: float
    slack_tokens: float
    slack_work: float
    unit: int


def balanced(n: int, length: int, unit: int = 1, documents: Iterable[tuple[int, int, int]] | None = None) -> Layout:
    """Ranks with equal tokens and equal causal work, which share few documents.

    Args:
        documents: (first token, token behind the last, position of the first) of each; together the sequence. None for
            one of all tokens.
    """
    left = [_Extent(*each) for each in ([(0, length, 0)] if documents is None else documents)]
    tokens, work = length, sum(each.work for each in left)
    slack = SLACK * length / n, SLACK * work / n
    due = work
    spans = []
    for others in range(n - 1, -1, -1):  # ranks that come behind
        share = _Share(tokens - length // unit * others // n * unit, due - work * others / n, *slack, unit)
        mine = [] if others else left
        if others and share.tokens > 0:
            mine, left = _Circle(left).take(share)
        tokens, due = tokens - sum(each.tokens for each in mine), due - sum(each.work for each in mine)
        spans.append(_joined(mine))
    return Layout("balanced", length, tuple(spans))


class _Circle:
    """Extents in a circle, those of the highest positions first. Places count its tokens, twice around."""

    def __init__(self, extents: Iterable[_Extent]) -> None:
        self.extents = sorted(extents, key=lambda each: (-each.density, each.start))
        tokens, work, position = np.array([(each.tokens, each.work, each.position) for each in self.extents]).T
        self.places = np.append(0, np.tile(tokens, 2).cumsum())
        self.work = np.append(0, np.tile(work, 2).cumsum())
        self.position = np.tile(position, 2)
        self.tokens = int(tokens.sum())

    def take(self, share: _Share) -> tuple[list[_Extent], list[_Extent]]:
        """A share, and what is left."""
        start, room = self._find(share)
        number = int(np.searchsorted(self.places, start, "right")) - 1
        before, first = self.extents[number].split(start - int(self.places[number]))
        left = [first, *self.extents[number + 1 :], *self.extents[:number], before]
        taken: list[_Extent] = []
        while room:
            each, rest = left[0].split(min(room, left[0].tokens))
            left[:1] = [rest] if rest.tokens else []
            taken.append(each)
            room -= each.tokens
        return taken, left if before.tokens else left[:-1]

    def _find(self, share: _Share) -> tuple[int, int]:
        """First place and tokens of a stretch that comes close: one of whole extents, else one that is cut at one end,
        else at both; the closest where none is exact. The first of a kind, so that the longest documents are cut."""
        bounds = self.places[: len(self.extents)]
        behind = np.searchsorted(self.places, bounds + share.tokens)
        for ends in (behind, behind - 1):
            more = self.places[ends] - bounds - share.tokens
            off = self.work[ends] - self.work[: len(bounds)] - share.work
            fits = (abs(more) <= share.slack_tokens) & (abs(off) <= share.slack_work) & (more % share.unit == 0)
            for number in np.flatnonzero(fits)[:1]:
                return int(bounds[number]), share.tokens + int(more[number])
        starts = np.unique(np.append(bounds, (bounds - share.tokens) % self.tokens))
        off = self._up_to(starts + share.tokens) - self._up_to(starts) - share.work
        near, (changes,) = np.flatnonzero(abs(off) <= share.slack_work), np.nonzero(off * np.roll(off, -1) < 0)
        if len(near) or not len(changes):
            return int(starts[near[0] if len(near) else abs(off).argmin()]), share.tokens
        number = changes[0]  # between two such starts the work changes evenly
        then = (number + 1) % len(starts)
        way = (starts[then] - starts[number]) % self.tokens
        return int(starts[number] + round(way * off[number] / (off[number] - off[then]))) % self.tokens, share.tokens

    def _up_to(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The work before each of some places."""
        number = np.searchsorted(self.places[:-1], places, "right") - 1
        tokens = places - self.places[number]
        found: NDArray[np.int64] = self.work[number] + tokens * (2 * self.position[number] + tokens)
        return found


def _joined(extents: Iterable[_Extent]) -> tuple[range, ...]:
    """Their tokens in ascending order."""
    spans: list[range] = []
    for each in sorted(extents):
        if spans and spans[-1].stop == each.start:
            spans[-1] = range(spans[-1].start, each.stop)
        else:
            spans.append(range(each.start, each.stop))
    return tuple(spans)
