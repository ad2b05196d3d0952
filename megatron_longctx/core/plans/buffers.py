"""Buffers of one rank: how long they hold blocks of other ranks, which blocks share one, and which are gathered."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, groupby, takewhile
from operator import itemgetter
from typing import NamedTuple

from .plan import RESULTS, Block, Heads, Kind, Plan
from .program import Buffer, Copy, Op, Rows, Space

LONG_RUN = 2048
"""The length from which a contiguous run of keys has separate kernel calls. Shorter neighbours are gathered."""


class LiveRange(NamedTuple):
    """Blocks of one kind and part of the heads that arrive in one step and share a buffer, in the order of the moves.

    If ranks share the heads, a call attends to these blocks together with blocks of this rank. Then `blocks` has both,
    in the order of the call, and the rank's own are copied into the buffer. The buffer is in use from the start of step
    `first`, which posts the receive, to the end of step `last`. kept: backward needs the content.
    """

    kind: Kind
    blocks: tuple[Block, ...]
    first: int
    last: int
    kept: bool = False

    @property
    def heads(self) -> Heads:
        return self.blocks[0].heads


def live_ranges(plan: Plan, rank: int) -> list[LiveRange]:
    """Return the live ranges of one rank in the order of arrival.

    Results live until the step after their arrival, when they are merged, or until the rank has passed them on.
    """
    uses, gathered = _uses(plan, rank), _gathered_with_own(plan, rank)
    found: list[LiveRange] = []
    for t, moves in enumerate(plan.receives(rank)):
        arriving: dict[tuple[Kind, Heads, bool], list[Block]] = {}
        for block, _, _ in moves:
            kept = not plan.backward and any(map(block.contains, plan.kept_of(rank, block.kind, block.home)))
            arriving.setdefault((block.kind, block.heads, kept), []).append(block)
        for (kind, _, kept), blocks in arriving.items():
            last = max(_last_use(block, uses, t + (kind in RESULTS)) for block in blocks)
            together = tuple(gathered.get((kind, frozenset(blocks)), blocks)) if gathered else tuple(blocks)
            found.append(LiveRange(kind, together, t, len(plan.steps) - 1 if kept else last, kept))
    return found


def _gathered_with_own(plan: Plan, rank: int) -> dict[tuple[Kind, frozenset[Block]], tuple[Block, ...]]:
    """Return the inputs of calls that join a part of the heads of this and other ranks, keyed by the others' blocks."""
    found: dict[tuple[Kind, frozenset[Block]], tuple[Block, ...]] = {}
    for step in plan.steps:
        for attend in step.attends[rank]:
            if attend.heads.parts > 1:
                for blocks in plan.inputs(attend, rank):
                    away = frozenset(block for block in blocks if block.home != rank)
                    if 0 < len(away) < len(blocks):
                        found.setdefault((blocks[0].kind, away), blocks)
    return found


_Uses = dict[tuple[Kind, int], list[tuple[int, int, Block]]]
_start = itemgetter(0)


def _uses(plan: Plan, rank: int) -> _Uses:
    """Return (start, step, block) of every block that a rank attends to or sends on, keyed by kind and home and sorted
    by start."""
    uses: _Uses = {}
    for t, (step, sends) in enumerate(zip(plan.steps, plan.sends(rank), strict=True)):
        inputs = [block for attend in step.attends[rank] for blocks in plan.inputs(attend, rank) for block in blocks]
        for block in (*inputs, *map(itemgetter(0), sends)):
            if block.home != rank:
                uses.setdefault((block.kind, block.home), []).append((block.start, t, block))
    for each in uses.values():
        each.sort(key=_start)
    return uses


def _last_use(block: Block, uses: _Uses, least: int) -> int:
    found = uses.get((block.kind, block.home))
    if found is None:
        return least
    within = takewhile(lambda use: use[0] < block.stop, found[bisect_left(found, block.start, key=_start) :])
    return max((t for _, t, used in within if block.contains(used)), default=least)


def assign_buffers(ranges: Sequence[LiveRange]) -> tuple[list[int], list[int]]:
    """Assign each live range of a rank to one of as few buffers as their lifetimes allow.

    Returns:
        For each range its buffer, and the step until which that was in use before (-1: never).
    """
    buffers: list[tuple[tuple[Kind, int, bool], int]] = []  # the type of each, and until when it is busy
    buffer_of, busy_until = [], []
    for each in ranges:
        type_ = (each.kind, each.heads.parts, each.kept)
        free = [(busy, i) for i, (other, busy) in enumerate(buffers) if other == type_ and busy < each.first]
        if not free:
            free = [(-1, len(buffers))]
            buffers.append((type_, -1))
        busy, number = min(free)  # free for longest, to wait the least
        buffer_of.append(number)
        busy_until.append(busy)
        buffers[number] = type_, each.last
    return buffer_of, busy_until


class BufferMap:
    """The rows that hold one rank's blocks, step by step.

    Args:
        buffer_of: the buffer of each range.
        ops: the list that copies are appended to.
        always_gather: gather all keys of a call unless they are contiguous.

    Attributes:
        buffers: those of the live ranges, followed by those of gathered rows.
        received: indexed by step, the rows that each arriving block is received into.
        own_copies: indexed by step, the copies (destination, source) of own rows among blocks that arrive in that step.
    """

    def __init__(
        self, rank: int, ranges: Sequence[LiveRange], buffer_of: Sequence[int], ops: list[Op], always_gather: bool
    ) -> None:
        self.rank, self.ops, self._always_gather = rank, ops, always_gather
        self.buffers: list[Buffer] = []
        self.received: dict[int, dict[Block, Rows]] = defaultdict(dict)
        self.own_copies: dict[int, list[tuple[Rows, Rows]]] = defaultdict(list)
        self._last_arrival: dict[int, int] = {}
        self._held: dict[tuple[Kind, int], list[tuple[LiveRange, Block, Rows]]] = defaultdict(list)
        self._gathered: dict[tuple[Block, ...], Rows] = {}
        self._scratch: dict[tuple[Kind, int], list[int]] = defaultdict(list)
        for each, number in zip(ranges, buffer_of, strict=True):
            end = 0
            for block in each.blocks:
                kind, home, start, stop, _, heads = block
                rows = Rows(Space.BUFFER, number, kind, end, end + stop - start, heads, heads)
                end = rows.stop
                self._held[kind, home].append((each, block, rows))
                self.received[each.first].setdefault(block, rows)
                if home == rank and kind not in RESULTS:
                    self.own_copies[each.first].append((rows, Rows(Space.OWN, 0, kind, start, stop, heads)))
            if number == len(self.buffers):
                self.buffers.append(Buffer(each.kind, 0, each.heads.parts, each.kept))
            self._grow(number, end)
            self._last_arrival[number] = max(each.first, self._last_arrival.get(number, 0))

    def _grow(self, number: int, tokens: int) -> None:
        if tokens > self.buffers[number].tokens:
            self.buffers[number] = self.buffers[number]._replace(tokens=tokens)

    def is_overwritten_after(self, buffer: int, t: int) -> bool:
        """Whether a message after step `t` is received into a buffer."""
        return self._last_arrival.get(buffer, 0) > t

    def find(self, block: Block, t: int) -> Rows:
        """Return the rows that hold an input block in step `t`."""
        for each, held, rows in self._held.get((block.kind, block.home), ()):
            if each.first < t <= each.last and held.contains(block):
                start = rows.start + block.start - held.start
                return Rows(Space.BUFFER, rows.number, block.kind, start, start + block.tokens, block.heads, held.heads)
        if block.home != self.rank:
            raise AssertionError(f"rank {self.rank} does not hold {block} in step {t}: the plan was not verified")
        return Rows(Space.OWN, 0, block.kind, block.start, block.stop, block.heads)

    def _contiguous(self, blocks: Sequence[Block], t: int) -> list[Rows]:
        """Return the rows of blocks, with neighbours in memory joined."""
        found: list[Rows] = []
        for block in blocks:
            rows = self.find(block, t)
            if found and found[-1].stop == rows.start and found[-1][:3] + found[-1][5:] == rows[:3] + rows[5:]:
                found[-1] = found[-1]._replace(stop=rows.stop)
            else:
                found.append(rows)
        return found

    def gathered(self, blocks: tuple[Block, ...], t: int, kept: bool) -> Rows:
        """Return the contiguous rows of blocks. A copy that this takes stays for later calls, or for backward."""
        found = self._contiguous(blocks, t)
        if len(found) == 1:
            return found[0]
        if kept or blocks not in self._gathered:
            kind, heads = found[0].kind, found[0].heads
            self.buffers.append(Buffer(kind, 0, heads.parts, kept))
            self._gathered[blocks] = self._gather(found, len(self.buffers) - 1)
        return self._gathered[blocks]

    def key_rows(self, blocks: tuple[Block, ...], t: int) -> list[tuple[Rows, int]]:
        """Return the keys of a call as contiguous rows, each with the number of its first row among all of the keys.

        Neighbouring short runs are gathered, in buffers that the next call uses again.
        """

        def is_long(rows: Rows) -> bool:
            return rows.tokens >= LONG_RUN and not self._always_gather

        found: list[Rows] = []
        num_gathers = 0
        for long, runs in groupby(self._contiguous(blocks, t), is_long):
            some = list(runs)
            if long or len(some) == 1:
                found += some
                continue
            scratch = self._scratch[some[0].kind, some[0].heads.parts]
            if num_gathers == len(scratch):
                scratch.append(len(self.buffers))
                self.buffers.append(Buffer(some[0].kind, 0, some[0].heads.parts))
            found.append(self._gather(some, scratch[num_gathers]))
            num_gathers += 1
        return list(zip(found, accumulate((rows.tokens for rows in found), initial=0), strict=False))

    def _gather(self, sources: Sequence[Rows], number: int) -> Rows:
        """Copy rows one behind the other into a buffer, which grows as needed."""
        kind, heads, end = sources[0].kind, sources[0].heads, 0
        pairs = []
        for rows in sources:
            pairs.append((Rows(Space.BUFFER, number, kind, end, end + rows.tokens, heads, heads), rows))
            end += rows.tokens
        self.ops.append(Copy(tuple(pairs)))
        self._grow(number, end)
        return Rows(Space.BUFFER, number, kind, 0, end, heads, heads)
