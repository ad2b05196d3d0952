"""Where a rank holds blocks, step by step, and what has to be copied together for a call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from .liveness import LiveRange
from .plan import RESULTS, Block, Kind
from .program import Buffer, Copy, Op, Rows, Space

LONG_RUN = 2048
"""Rows of keys that lie apart: stretches of so many get kernel calls of their own, shorter ones are copied together."""


class Places:
    """The places of one rank's blocks.

    Args:
        buffer_of: by live range, its buffer. ops: where copies are noted. joined: keys of a call that lie apart are
            always copied together.

    Attributes:
        buffers: of live ranges first, then of gathered rows.
    """

    def __init__(
        self, rank: int, ranges: Sequence[LiveRange], buffer_of: Sequence[int], ops: list[Op], joined: bool
    ) -> None:
        self.rank, self.ops, self._keys_joined = rank, ops, joined
        self.buffers = _buffers(ranges, buffer_of)
        self._arriving: dict[int, list[tuple[LiveRange, int]]] = defaultdict(list)
        self._last_arrival: dict[int, int] = {}
        self._into: dict[int, dict[Block, Rows]] = defaultdict(dict)
        self._held: dict[tuple[Kind, int], list[tuple[LiveRange, int, Block, int]]] = defaultdict(list)
        for each, buffer in zip(ranges, buffer_of, strict=True):
            self._arriving[each.first].append((each, buffer))
            self._last_arrival[buffer] = max(each.first, self._last_arrival.get(buffer, 0))
            into, at = self._into[each.first], 0
            for block in each.blocks:
                kind, home, start, stop, _, heads = block
                self._held[kind, home].append((each, buffer, block, at))
                after = at + stop - start
                into.setdefault(block, Rows(Space.BUFFER, buffer, kind, at, after, heads, heads))
                at = after
        self._gathered: dict[tuple[Block, ...], Rows] = {}
        self._of_calls: dict[tuple[Kind, int], list[int]] = defaultdict(list)

    def into(self, t: int) -> Mapping[Block, Rows]:
        """The rows that blocks are received into in step `t`."""
        return self._into[t]

    def own_among(self, t: int) -> Iterator[tuple[Rows, Rows]]:
        """The copies that put own rows among those of other ranks that arrive in step `t`."""
        for each, buffer in self._arriving.get(t, ()):
            if each.kind not in RESULTS:
                at = 0
                for block in each.blocks:
                    if block.home == self.rank:
                        into = Rows(Space.BUFFER, buffer, block.kind, at, at + block.tokens, block.heads, block.heads)
                        yield into, Rows(Space.OWN, 0, block.kind, block.start, block.stop, block.heads)
                    at += block.tokens

    def is_received_after(self, buffer: int, t: int) -> bool:
        """Whether a buffer is received into after step `t`."""
        return self._last_arrival.get(buffer, 0) > t

    def find(self, block: Block, t: int) -> Rows:
        """Where this rank holds an input block in step `t`."""
        for each, buffer, held, at in self._held.get((block.kind, block.home), ()):
            if each.first < t <= each.last and held.contains(block):
                start = at + block.start - held.start
                return Rows(Space.BUFFER, buffer, block.kind, start, start + block.tokens, block.heads, held.heads)
        if block.home != self.rank:
            raise AssertionError(f"rank {self.rank} does not hold {block} in step {t}: the plan was not verified")
        return Rows(Space.OWN, 0, block.kind, block.start, block.stop, block.heads)

    def _stretches(self, blocks: Sequence[Block], t: int) -> list[Rows]:
        """Blocks as the fewest rows: neighbours in memory are one."""
        found: list[Rows] = []
        for block in blocks:
            rows = self.find(block, t)
            if found and found[-1].stop == rows.start and found[-1][:3] + found[-1][5:] == rows[:3] + rows[5:]:
                found[-1] = found[-1]._replace(stop=rows.stop)
            else:
                found.append(rows)
        return found

    def joined(self, blocks: tuple[Block, ...], t: int, kept: bool) -> Rows:
        """Blocks as one stretch; what has to be copied together stays for the calls that follow, or for backward."""
        stretches = self._stretches(blocks, t)
        if len(stretches) == 1:
            return stretches[0]
        if kept or blocks not in self._gathered:
            self._gathered[blocks] = self._gather(stretches, kept)
        return self._gathered[blocks]

    def _gather(self, stretches: Sequence[Rows], kept: bool = False, of_call: int | None = None) -> Rows:
        """Copy stretches together. of_call: how many were before it for the keys of a call, whose buffers the next call
        may have; None for rows that stay."""
        kind, heads = stretches[0].kind, stretches[0].heads
        tokens = sum(rows.tokens for rows in stretches)
        number = len(self.buffers)
        if of_call is not None:
            numbers = self._of_calls[kind, heads.parts]
            numbers += [number] * (of_call == len(numbers))
            number = numbers[of_call]
        if number == len(self.buffers):
            self.buffers.append(Buffer(kind, tokens, heads.parts, kept))
        elif tokens > self.buffers[number].tokens:
            self.buffers[number] = Buffer(kind, tokens, heads.parts, kept)
        into = Rows(Space.BUFFER, number, kind, 0, tokens, heads, heads)
        starts = accumulate((rows.tokens for rows in stretches), initial=0)
        pairs = ((narrow(into, at, at + rows.tokens), rows) for at, rows in zip(starts, stretches, strict=False))
        self.ops.append(Copy(tuple(pairs)))
        return into

    def key_rows(self, blocks: tuple[Block, ...], t: int) -> list[tuple[Rows, int]]:
        """Stretches of keys, each with the number of its first gathered row."""
        stretches = self._stretches(blocks, t)
        if len(stretches) > 1:
            apart = [] if self._keys_joined else [rows.tokens >= LONG_RUN for rows in stretches]
            if apart.count(True) < len(stretches) - 1 or self._keys_joined:
                return self._partly_gathered(stretches, apart or [False] * len(stretches))
        starts = accumulate((rows.tokens for rows in stretches), initial=0)
        return list(zip(stretches, starts, strict=False))

    def _partly_gathered(self, stretches: list[Rows], apart: list[bool]) -> list[tuple[Rows, int]]:
        """Neighbouring short stretches together."""
        found: list[tuple[Rows, int]] = []
        some: list[Rows] = []
        at = gathered = 0
        for rows, long in zip((*stretches, None), (*apart, True), strict=True):
            if long and some:
                before = at - sum(each.tokens for each in some)
                together = some[0] if len(some) == 1 else self._gather(some, of_call=gathered)
                gathered += len(some) > 1
                found.append((together, before))
                some = []
            if rows is not None:
                if long:
                    found.append((rows, at))
                else:
                    some.append(rows)
                at += rows.tokens
        return found


def narrow(rows: Rows, start: int, stop: int) -> Rows:
    """Rows `start..stop-1` of some."""
    return rows if stop - start == rows.tokens else rows._replace(start=rows.start + start, stop=rows.start + stop)


def _buffers(ranges: Sequence[LiveRange], buffer_of: Sequence[int]) -> list[Buffer]:
    """Every buffer, as large as the largest of its live ranges."""
    found: dict[int, Buffer] = {}
    for each, number in zip(ranges, buffer_of, strict=True):
        tokens = max(each.tokens, found[number].tokens if number in found else 0)
        found[number] = Buffer(each.kind, tokens, each.heads.parts, each.kept)
    return [found[number] for number in range(len(found))]
