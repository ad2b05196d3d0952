"""From the slices that a rank attends to, to as few calls of its kernel as the kernel supports.

Kernels align the ends of queries and keys: the last query faces the last key, and a call's window counts from there.
Every band consists of at most two such pieces. Pieces with the same window whose rows do not overlap are segments of
one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from .slices import FAR, Slice, joined

_TILE = 128
"""A multiple of the rows that kernels compute together. Long causal segments are cut at multiples of it."""


class KernelSupport(NamedTuple):
    """The calls that a kernel supports."""

    packed: bool = False
    """Whether a call may have several segments."""
    rectangles: bool = False
    """Whether windows and causal segments may have fewer queries than keys."""
    windows: bool = False
    """Whether a kernel with `rectangles` supports bounds other than causal."""
    bands: bool = False
    """Whether any bounds are supported, with unaligned ends too."""
    longest_causal: int = FAR
    """The most queries of a causal segment in backward, 1 or more. Longer ones are slower than several calls."""


PLAINEST = KernelSupport()
"""Full rectangles and causal squares, one per call."""


def fa4_takes(deterministic: bool) -> KernelSupport:
    """Return what FlashAttention-4 supports, the default kernel on GPUs.

    Its deterministic backward becomes slower with the length of causal segments: on an H200, forward and backward of
    128K tokens take 1.38 times as long, but 1.03 times if segments are cut.
    """
    return KernelSupport(packed=True, rectangles=True, windows=True, longest_causal=32 * 1024 if deterministic else FAR)


class Segment(NamedTuple):
    """Queries and keys of a call that see each other within its window."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class KernelCall(NamedTuple):
    """One kernel call. Query i of a segment of s queries and t keys sees key j if `-left <= j - i - (t - s) <= right`.

    FAR means no bound. Segments ascend in queries and in keys without overlap, possibly with rows between them. They
    count the rows of the tensors that the call is given.
    """

    segments: tuple[Segment, ...]
    left: int = FAR
    right: int = FAR

    @property
    def q_span(self) -> tuple[int, int]:
        """The range from the first to the last query."""
        return self.segments[0].q_start, self.segments[-1].q_stop

    @property
    def k_span(self) -> tuple[int, int]:
        return self.segments[0].k_start, self.segments[-1].k_stop

    @property
    def most_queries(self) -> int:
        """The number of queries of the longest segment."""
        return max(each.q_stop - each.q_start for each in self.segments)

    @property
    def most_keys(self) -> int:
        return max(each.k_stop - each.k_start for each in self.segments)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The visible pairs, one slice per segment."""
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
        """Whether the only bound is that no query sees a key behind its own."""
        return self.right == 0 and self.left == FAR

    @property
    def full(self) -> bool:
        return self.right == self.left == FAR

    def moved(self, queries: int, keys: int) -> KernelCall:
        """Return the same call with `queries` and `keys` added to its row numbers."""
        if not queries and not keys:
            return self
        moved = (Segment(q0 + queries, q1 + queries, k0 + keys, k1 + keys) for q0, q1, k0, k1 in self.segments)
        return self._replace(segments=tuple(moved))


def kernel_calls(slices: Iterable[Slice], takes: KernelSupport) -> tuple[KernelCall, ...]:
    """Return the fewest calls that cover slices, which count rows of the query and key tensors.

    Refuse a window that the kernel does not support.
    """
    return _calls(tuple(slices), takes)


@lru_cache(maxsize=4096)
def _calls(slices: tuple[Slice, ...], takes: KernelSupport) -> tuple[KernelCall, ...]:
    pieces = [piece for each in joined(slices) for piece in _pieces(each, takes)]
    if not takes.packed:
        return tuple(pieces)
    calls: list[tuple[KernelCall, list[Segment]]] = []  # each with all of its segments
    # Pieces with a window come first: others may join them.
    for piece in sorted(pieces, key=lambda piece: (piece.left == FAR, piece.segments)):
        segments = next((found for call, found in calls if _fits(piece, call, found)), None)
        if segments is None:
            calls.append((piece, [*piece.segments]))
        else:
            segments += piece.segments
    found = [call._replace(segments=tuple(sorted(segments))) for call, segments in calls]
    return tuple(sorted(found, key=lambda call: (not call.full, call.segments)))


def _fits(piece: KernelCall, call: KernelCall, segments: Iterable[Segment]) -> bool:
    """Whether a piece may join a call: it has the call's window or is not bound by it, and no rows overlap."""
    (segment,) = piece.segments
    unbound = piece.left == FAR and call.left >= segment.k_stop - segment.k_start - 1
    same_window = piece.right == call.right and (piece.left == call.left or unbound)
    return same_window and all(_apart(segment, other) for other in segments)


def _apart(a: Segment, b: Segment) -> bool:
    """Whether one segment is behind the other in queries and in keys."""
    if a.q_start > b.q_start:
        a, b = b, a
    return a.q_stop <= b.q_start and a.k_stop <= b.k_start


def _pieces(each: Slice, takes: KernelSupport) -> Iterator[KernelCall]:
    """Yield calls of one segment each, with aligned ends, that cover a tight slice."""
    q0, q1, k0, k1, lo, hi = each
    if each.is_full:
        yield KernelCall((Segment(q0, q1, k0, k1),))
        return
    if takes.bands and lo != -FAR:
        ends = k1 - q1
        yield KernelCall((Segment(q0, q1, k0, k1),), ends - lo, FAR if hi == FAR else hi - ends)
        return
    if lo != -FAR and not (takes.windows and takes.rectangles):
        raise ValueError(f"a window ({each}): expected causal or full attention of this kernel. Choose another kernel.")
    if hi != FAR and hi > k1 - q1:  # the last queries see all keys up to the end, so the others end with the last key
        split = k1 - hi
        for part in (each.cut(q0, split, k0, k1), each.cut(split, q1, k0, k1)):
            if part is not None:
                yield from _pieces(part, takes)
        return
    left = FAR if lo == -FAR else k1 - q1 - lo
    if hi != FAR and not takes.rectangles and k1 - k0 > q1 - q0:
        middle = k1 - (q1 - q0)
        yield KernelCall((Segment(q0, q1, k0, middle),))
        k0 = middle
    if hi != FAR and left == FAR:
        yield from _causal(Segment(q0, q1, k0, k1), takes.longest_causal)
    else:
        yield KernelCall((Segment(q0, q1, k0, k1),), left, FAR if hi == FAR else 0)


def _causal(segment: Segment, longest: int) -> Iterator[KernelCall]:
    """Halve a causal segment until none has more than `longest` queries. The rectangles below them are full."""
    q0, q1, k0, k1 = segment
    if q1 - q0 <= longest:
        yield KernelCall((segment,), right=0)
        return
    half = (q1 - q0 + 1) // 2
    middle = q0 + (-(-half // _TILE) * _TILE if half >= _TILE else half)
    facing = k1 - (q1 - middle)
    yield from _causal(Segment(q0, middle, k0, facing), longest)
    yield KernelCall((Segment(middle, q1, k0, facing),))
    yield from _causal(Segment(middle, q1, facing, k1), longest)
