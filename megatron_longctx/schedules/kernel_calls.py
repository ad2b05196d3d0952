"""From what a rank is to attend to the calls of its kernel: as few as the kernel can take.

Kernels align the ends of queries and keys: the last query faces the last key, and a call's window counts from there.
Every band falls into at most two such pieces; pieces with one window whose rows do not overlap are segments of one
call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from .mask import FAR, Slice, joined

_TILE = 128
"""Kernels compute tiles of so many rows, or of a part of it: segments are cut between them."""


class Takes(NamedTuple):
    """Which calls a kernel takes.

    packed: several segments at once. rectangles: windows and causal segments of fewer queries than keys, else causal
    squares only. windows: bounds other than causal, of one that takes rectangles. bands: any bounds, whatever faces
    whatever. longest_causal: the most queries of a causal segment in a backward pass, at least 1; more would be slower.
    """

    packed: bool = False
    rectangles: bool = False
    windows: bool = False
    bands: bool = False
    longest_causal: int = FAR


PLAINEST = Takes()
"""Full rectangles and causal squares, one a call."""


def of_gpus(deterministic: bool) -> Takes:
    """What the default kernel of GPUs takes, FlashAttention-4. Its deterministic backward pass loses speed with the
    length of causal segments: on an H200, forward and backward take 1.38 times as long with 128K tokens. Cut, it is
    1.03 times."""
    return Takes(packed=True, rectangles=True, windows=True, longest_causal=32 * 1024 if deterministic else FAR)


class Segment(NamedTuple):
    """Rows of a call that see each other within its window."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class KernelCall(NamedTuple):
    """One call of a kernel: query i of a segment of s queries and t keys sees key j where
    `-left <= j - i - (t - s) <= right`; FAR for no bound.

    Segments are ascending in queries and in keys and do not overlap in either; there may be rows between them. Numbers
    are rows of the tensors that the call is given.
    """

    segments: tuple[Segment, ...]
    left: int = FAR
    right: int = FAR

    @property
    def q_span(self) -> tuple[int, int]:
        """From the first to the last of its queries."""
        return self.segments[0].q_start, self.segments[-1].q_stop

    @property
    def k_span(self) -> tuple[int, int]:
        return self.segments[0].k_start, self.segments[-1].k_stop

    @property
    def most_queries(self) -> int:
        """Of one segment."""
        return max(each.q_stop - each.q_start for each in self.segments)

    @property
    def most_keys(self) -> int:
        return max(each.k_stop - each.k_start for each in self.segments)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """What is visible, by segment."""
        found = []
        for q0, q1, k0, k1 in self.segments:
            ends = k1 - q1
            lo, hi = (-FAR if self.left == FAR else ends - self.left), (FAR if self.right == FAR else ends + self.right)
            found.append(Slice(q0, q1, k0, k1, lo, hi))
        return tuple(found)

    @property
    def pairs(self) -> int:
        return sum(each.pairs for each in self.slices)

    @property
    def causal(self) -> bool:
        """Whether it is plainly causal: no query sees a key behind its own."""
        return self.right == 0 and self.left == FAR

    @property
    def full(self) -> bool:
        return self.right == self.left == FAR

    def moved(self, queries: int, keys: int) -> KernelCall:
        """The same call over tensors that begin so many rows earlier."""
        if not queries and not keys:
            return self
        return self._replace(
            segments=tuple(
                Segment(q0 + queries, q1 + queries, k0 + keys, k1 + keys) for q0, q1, k0, k1 in self.segments
            )
        )


def kernel_calls(slices: Iterable[Slice], takes: Takes) -> tuple[KernelCall, ...]:
    """The fewest calls that cover slices, whose numbers are rows of the queries' and the keys' tensors.

    Raises:
        ValueError: a window, for a kernel that takes none.
    """
    return _calls(tuple(slices), takes)


@lru_cache(maxsize=4096)
def _calls(slices: tuple[Slice, ...], takes: Takes) -> tuple[KernelCall, ...]:
    pieces = [piece for each in joined(slices) for piece in _pieces(each, takes)]
    if not takes.packed:
        return tuple(KernelCall((segment,), left, right) for segment, left, right in pieces)
    calls: list[_Open] = []
    # Those with a window of their own first: others may join them.
    for piece in sorted(pieces, key=lambda piece: (piece.left == FAR, piece.segment)):
        if not any(call.takes(piece) for call in calls):
            calls.append(_Open(piece))
    found = [KernelCall(tuple(sorted(call.segments)), call.left, call.right) for call in calls]
    return tuple(sorted(found, key=lambda call: (not call.full, call.segments)))


class _Piece(NamedTuple):
    segment: Segment
    left: int
    right: int


class _Open:
    """A call under way."""

    def __init__(self, piece: _Piece) -> None:
        self.segments = [piece.segment]
        self.left, self.right = piece.left, piece.right

    def takes(self, piece: _Piece) -> bool:
        """Add the piece if it fits: the same window, or one that does not bind it, and rows behind all others'."""
        segment, left, right = piece
        if right != self.right or (
            left != self.left and not (left == FAR and self.left >= segment.k_stop - segment.k_start - 1)
        ):
            return False
        if any(not _apart(segment, other) for other in self.segments):
            return False
        self.segments.append(segment)
        return True


def _apart(a: Segment, b: Segment) -> bool:
    """Whether one lies behind the other in queries and in keys."""
    if a.q_start > b.q_start:
        a, b = b, a
    return a.q_stop <= b.q_start and a.k_stop <= b.k_start


def _pieces(each: Slice, takes: Takes) -> Iterator[_Piece]:
    """A tight slice as pieces whose ends are aligned."""
    q0, q1, k0, k1, lo, hi = each
    if each.is_full:
        yield _Piece(Segment(q0, q1, k0, k1), FAR, FAR)
        return
    if takes.bands and lo != -FAR:
        ends = k1 - q1
        yield _Piece(Segment(q0, q1, k0, k1), FAR if lo == -FAR else ends - lo, FAR if hi == FAR else hi - ends)
        return
    if lo != -FAR and not (takes.windows and takes.rectangles):
        raise ValueError(f"a window ({each}): expected causal or full attention of this kernel. Choose another kernel.")
    if hi != FAR and hi > k1 - q1:  # the last queries see all keys up to the end: the others end with the last key
        split = k1 - hi
        for part in (each.cut(q0, split, k0, k1), each.cut(split, q1, k0, k1)):
            if part is not None:
                yield from _pieces(part, takes)
        return
    left = FAR if lo == -FAR else k1 - q1 - lo
    if hi != FAR and not takes.rectangles and k1 - k0 > q1 - q0:
        middle = k1 - (q1 - q0)
        yield _Piece(Segment(q0, q1, k0, middle), FAR, FAR)
        k0 = middle
    if hi != FAR and left == FAR:
        yield from _causal(Segment(q0, q1, k0, k1), takes.longest_causal)
    else:
        yield _Piece(Segment(q0, q1, k0, k1), left, FAR if hi == FAR else 0)


def _causal(segment: Segment, longest: int) -> Iterator[_Piece]:
    """A causal segment in halves, again and again, until none has more queries; what is below them is full."""
    q0, q1, k0, k1 = segment
    if q1 - q0 <= longest:
        yield _Piece(segment, FAR, 0)
        return
    half = (q1 - q0 + 1) // 2
    middle = q0 + (-(-half // _TILE) * _TILE if half >= _TILE else half)
    facing = k1 - (q1 - middle)
    yield from _causal(Segment(q0, middle, k0, facing), longest)
    yield _Piece(Segment(middle, q1, k0, facing), FAR, FAR)
    yield from _causal(Segment(middle, q1, facing, k1), longest)
