"""Where all that a rank sends lies in the memory that its peers read. Every rank computes every other's: nothing is
exchanged. What is no longer read makes room for what comes later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from .mask import merge_spans
from .plan import GRADIENTS, RESULTS, Block, Heads, Kind, Move, Plan
from .program import Message, Region, SendLayout

ALIGNMENT = 256

_READ_FOR = 2
"""Steps after which a message's memory may be used again: by then its readers are long done, and waiting for their
word costs nothing."""

RowBytes = Callable[[Kind, Heads], Sequence[int]]
"""Bytes of a token of a kind, by field."""


class Batch(NamedTuple):
    """What is sent together: `num_bytes` that peers read in `step`.

    written: the first step in which it is written. passed: by the messages of that step, which pass on what came from
    other ranks; else by the step's kernel calls, which wait for the messages of the step before.
    """

    step: int
    written: int
    num_bytes: int
    passed: bool

    @property
    def freed(self) -> int:
        """Only what was read up to `_READ_FOR` steps before this step may lie where this batch is to be."""
        return self.written if self.passed else self.written - 1


@dataclass(frozen=True)
class Placement:
    """offsets: by batch. num_bytes: of all. awaited: by a step whose memory is used again, the step in which its
    readers' word has to be awaited."""

    offsets: tuple[int, ...]
    num_bytes: int
    awaited: dict[int, int]


def place(batches: Sequence[Batch]) -> Placement:
    """Each batch at the lowest offset that is free for as long as it is needed."""
    order = sorted(range(len(batches)), key=lambda i: (batches[i].written, batches[i].step))
    offsets = [0] * len(batches)
    placed: list[int] = []
    awaited: dict[int, int] = {}
    for i in order:
        batch = batches[i]
        # What is known to be awaited before anything from here on is freed changes no more: plans of many ranks reuse
        # memory in most steps, so that few batches are left to look at.
        placed = [j for j in placed if awaited.get(batches[j].step, batch.written) >= batch.written]
        over = [j for j in placed if batches[j].step + _READ_FOR <= batch.freed]
        offset = 0
        for j in sorted(set(placed) - set(over), key=lambda j: offsets[j]):
            if offset + batch.num_bytes > offsets[j]:
                offset = max(offset, offsets[j] + batches[j].num_bytes)
        offsets[i] = offset
        for j in over:
            if offset < offsets[j] + batches[j].num_bytes and offsets[j] < offset + batch.num_bytes:
                awaited[batches[j].step] = min(batch.freed, awaited.get(batches[j].step, batch.freed))
        placed.append(i)
    total = max((offset + batch.num_bytes for offset, batch in zip(offsets, batches, strict=True)), default=0)
    return Placement(tuple(offsets), total, awaited)


Carrier = tuple[Block, int]
"""A message with results: its block and its step."""


class ResultsSent(NamedTuple):
    """What a rank computes for others. computed: by message, the step in which its last part is. parts: by message, how
    many calls and arrivals add to it. carried: by step and call, what it computes for others, each with its message.
    added: by step, other ranks' partial gradients that came in the step before and go on in a message of this rank's,
    likewise. by_call: by message, whether its last part is a call's."""

    computed: dict[Carrier, int]
    parts: dict[Carrier, int]
    carried: list[list[list[tuple[Block, Carrier]]]]
    added: list[list[tuple[Block, Carrier]]]
    by_call: dict[Carrier, bool]


def results_sent(plan: Plan, rank: int) -> ResultsSent:
    """That of one rank."""
    sent: dict[tuple[Kind, int], list[Carrier]] = {}
    computed: dict[Carrier, int] = {}
    for t, moves in enumerate(plan.sends(rank)):
        for block, _, _ in moves:
            if block.kind in RESULTS and block.origin == rank:
                sent.setdefault((block.kind, block.home), []).append((block, t))
                computed[block, t] = t - 1
    parts, by_call = dict.fromkeys(computed, 0), dict.fromkeys(computed, True)
    carried: list[list[list[tuple[Block, Carrier]]]] = []
    added: list[list[tuple[Block, Carrier]]] = []
    before: list[Move] = []
    for t, (step, arriving) in enumerate(zip(plan.steps, plan.receives(rank), strict=True)):
        arrived = [block for block, _, _ in before if block.kind in GRADIENTS and block.home != rank]
        added.append([(block, _carrier(block.result(block.kind, rank), t, sent)) for block in arrived])
        calls = step.attends[rank]
        found = [[(part, _carrier(part, t, sent)) for part in plan.results_away(each, rank)] for each in calls]
        for call, messages in ((False, added[t]), (True, chain.from_iterable(found))):
            for _, message in messages:
                computed[message], by_call[message] = t, call
                parts[message] += 1
        carried.append(found)
        before = arriving
    return ResultsSent(computed, parts, carried, added, by_call)


def _carrier(part: Block, t: int, sent: dict[tuple[Kind, int], list[Carrier]]) -> Carrier:
    """The message that takes along a part computed in step `t`. sent: by kind and home."""
    return next((block, u) for block, u in sent.get((part.kind, part.home), ()) if u > t and block.contains(part))


class _Builder:
    """Regions one after the other."""

    def __init__(self, row_bytes: RowBytes) -> None:
        self.row_bytes = row_bytes
        self.regions: list[Region] = []
        self.num_bytes = 0

    def region(self, kind: Kind, heads: Heads, tokens: int) -> int:
        offsets, sizes = [], tuple(self.row_bytes(kind, heads))
        for size in sizes:
            offsets.append(self.num_bytes)
            self.num_bytes += _aligned(size * tokens)
        self.regions.append(Region(kind, heads, tokens, tuple(offsets), sizes))
        return len(self.regions) - 1

    def bytes_of(self, block: Block) -> int:
        return sum(_aligned(size * block.tokens) for size in self.row_bytes(block.kind, block.heads))


def send_layout(
    plan: Plan, rank: int, row_bytes: RowBytes, peers: frozenset[int], computed: dict[Carrier, int]
) -> SendLayout:
    """That of one rank.

    Args:
        computed: of `ResultsSent`.
        peers: the ranks that read its memory; others are sent to. What is only passed on to these lies in no region.
    """
    builder = _Builder(row_bytes)
    sends = plan.sends(rank)
    own: dict[tuple[Kind, Heads], list[tuple[int, int]]] = {}
    first: dict[tuple[Kind, Heads], int] = {}
    for t, moves in enumerate(sends):
        for block, _, _ in moves:
            if block.home == rank and block.kind not in RESULTS:
                own.setdefault((block.kind, block.heads), []).append((block.start, block.stop))
                first.setdefault((block.kind, block.heads), t)
    published: list[list[tuple[int, tuple[tuple[int, int], ...]]]] = [[] for _ in sends]
    places: dict[tuple[Kind, Heads], tuple[int, tuple[tuple[int, int], ...]]] = {}
    for name in sorted(own, key=lambda name: (name[0], name[1].parts, name[1].part)):
        spans = tuple(merge_spans(own[name]))
        places[name] = builder.region(*name, sum(stop - start for start, stop in spans)), spans
        published[first[name]].append(places[name])
    batches: list[tuple[Batch, list[tuple[Block, int]]]] = []
    for t, moves in enumerate(sends):
        results = [block for block, _, _ in moves if block.kind in RESULTS and block.origin == rank]
        passed = [
            (block, to)
            for block, _, to in moves
            if to in peers and (block.origin != rank if block.kind in RESULTS else block.home != rank)
        ]
        if results:
            size = sum(map(builder.bytes_of, results))
            batches.append((Batch(t, min(computed[b, t] for b in results), size, False), [(b, -1) for b in results]))
        if passed:
            batches.append((Batch(t, t, sum(builder.bytes_of(block) for block, _ in passed), True), passed))
    placement = place([batch for batch, _ in batches])
    base = builder.num_bytes
    regions: dict[tuple[Block, int, int], int] = {}  # by block, step and, where it is passed on, to whom
    for offset, (batch, blocks) in zip(placement.offsets, batches, strict=True):
        builder.num_bytes = base + offset
        for block, to in blocks:
            regions[block, batch.step, to] = builder.region(block.kind, block.heads, block.tokens)
    messages = []
    for t, moves in enumerate(sends):
        found = []
        for block, _, to in moves:
            if block.kind in RESULTS and block.origin == rank:
                found.append(Message(block, to, regions[block, t, -1], 0, False))
            elif block.kind not in RESULTS and block.home == rank:
                region, spans = places[block.kind, block.heads]
                found.append(Message(block, to, region, _row(spans, block.start), False))
            else:
                found.append(Message(block, to, regions.get((block, t, to), -1), 0, True))
        messages.append(tuple(found))
    awaits: dict[int, tuple[int, ...]] = {}
    for step, awaiting in sorted(placement.awaited.items()):
        awaits[awaiting] = (*awaits.get(awaiting, ()), step)
    return SendLayout(
        tuple(builder.regions),
        tuple(messages),
        base + placement.num_bytes,
        tuple(map(tuple, published)),
        {(block, t): region for (block, t, to), region in regions.items() if to == -1},
        awaits,
    )


def _row(spans: Sequence[tuple[int, int]], row: int) -> int:
    """Where a row lies among those of some spans, one after the other."""
    before = 0
    for start, stop in spans:
        if start <= row < stop:
            return before + row - start
        before += stop - start
    raise AssertionError(f"row {row} is not published")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
