"""The layout of a rank's send memory, which its peers read.

Every rank computes the layouts of its peers, so no offsets are exchanged. Memory that has been read is reused later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from .plan import GRADIENTS, RESULTS, Block, Heads, Kind, Move, Plan
from .slices import merge_spans
from .workload import Target


class Region(NamedTuple):
    """Rows of send memory. Its offsets and its row sizes are in bytes, one per field (`plan.FIELDS`)."""

    kind: Kind
    heads: Heads
    tokens: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def spans(self, start: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """Return (offset, bytes) of `tokens` rows from row `start` on, one pair per field."""
        return tuple((at + start * size, tokens * size) for at, size in zip(self.offsets, self.sizes, strict=True))


class SentMessage(NamedTuple):
    """A block for `peer`, sent from row `start` of a region of send memory on.

    passed: the block comes from another rank. It is copied into its region when it is sent; without a region (-1) it is
    sent directly from its buffer.
    """

    block: Block
    peer: int
    region: int
    start: int
    passed: bool


class Packed(NamedTuple):
    """Own rows that are copied into a region of send memory, to its rows from `start` on."""

    block: Block
    region: int
    start: int


@dataclass(frozen=True)
class SendLayout:
    """The layout of a rank's send memory, and the messages that are sent from it.

    packing: indexed by step, the own rows to copy into regions which that step is the first to send.
    awaits: keyed by step, the earlier steps whose messages must have been read before it starts: it reuses their
    memory.
    """

    regions: tuple[Region, ...]
    messages: tuple[tuple[SentMessage, ...], ...]  # indexed by step
    num_bytes: int
    packing: tuple[tuple[Packed, ...], ...]
    results: dict[tuple[Block, int], int]  # regions, keyed by result and the step that sends it
    awaits: dict[int, tuple[int, ...]]


ALIGNMENT = 256

_READ_WITHIN = 2
"""Steps after which the memory of a message may be reused. By then its readers are long done, so waiting for their
confirmation costs nothing."""

RowBytes = Callable[[Kind, Heads], Sequence[int]]
"""The bytes of one token of a kind, by field."""


class MessageBatch(NamedTuple):
    """Messages of one step that share the lifetime of their memory: `num_bytes` bytes, which peers read in `step`.

    written: the first step that writes them. passed: whether the messages of that step write them, to pass on blocks of
    other ranks. Otherwise the step's kernel calls do, which wait for the messages of the step before.
    """

    step: int
    written: int
    num_bytes: int
    passed: bool

    @property
    def free_by(self) -> int:
        """The step whose start waits for earlier readers of this memory, which read it `_READ_WITHIN` steps before."""
        return self.written if self.passed else self.written - 1


def place(batches: Sequence[MessageBatch]) -> tuple[list[int], int, dict[int, int]]:
    """Place each batch at the lowest offset that is free during its whole lifetime.

    Return the offset of each batch, the bytes of all, and, keyed by a step whose memory is reused, the step that awaits
    its readers.
    """
    order = sorted(range(len(batches)), key=lambda i: (batches[i].written, batches[i].step))
    offsets = [0] * len(batches)
    placed: list[int] = []
    awaited: dict[int, int] = {}
    for i in order:
        batch = batches[i]
        # A step that is awaited before this batch is written constrains nothing from here on. Plans of many ranks reuse
        # memory in most steps, so this leaves few batches to compare with.
        placed = [j for j in placed if awaited.get(batches[j].step, batch.written) >= batch.written]
        free = [j for j in placed if batches[j].step + _READ_WITHIN <= batch.free_by]
        offset = 0
        for j in sorted(set(placed) - set(free), key=lambda j: offsets[j]):
            if offset + batch.num_bytes > offsets[j]:
                offset = max(offset, offsets[j] + batches[j].num_bytes)
        offsets[i] = offset
        for j in free:
            if offset < offsets[j] + batches[j].num_bytes and offsets[j] < offset + batch.num_bytes:
                awaited[batches[j].step] = min(batch.free_by, awaited.get(batches[j].step, batch.free_by))
        placed.append(i)
    total = max((offset + batch.num_bytes for offset, batch in zip(offsets, batches, strict=True)), default=0)
    return offsets, total, awaited


ResultMessage = tuple[Block, int]
"""A message that carries results: its block and its step."""


class SentResults(NamedTuple):
    """The results that a rank computes for other ranks, and the messages that carry them."""

    computed: dict[ResultMessage, int]  # the step of the last part
    by_call: dict[ResultMessage, bool]  # whether a kernel call computes the last part
    parts: dict[ResultMessage, int]  # the number of calls and arrivals that add to it
    carried: list[list[list[tuple[Block, ResultMessage]]]]  # indexed by step and call: its results for other ranks
    added: list[list[tuple[Block, ResultMessage]]]  # indexed by step: gradients that came the step before and go on


def sent_results(plan: Plan, rank: int) -> SentResults:
    """Return the results that `rank` computes for other ranks."""
    sent: dict[tuple[Kind, int], list[ResultMessage]] = {}  # keyed by kind and home
    computed: dict[ResultMessage, int] = {}
    for t, moves in enumerate(plan.sends(rank)):
        for block, _, _ in moves:
            if block.kind in RESULTS and block.origin == rank:
                sent.setdefault((block.kind, block.home), []).append((block, t))
                computed[block, t] = t - 1

    def carrier(part: Block, t: int) -> ResultMessage:
        """Return the message that carries a part which is computed in step `t`."""
        return next((block, u) for block, u in sent.get((part.kind, part.home), ()) if u > t and block.contains(part))

    parts, by_call = dict.fromkeys(computed, 0), dict.fromkeys(computed, True)
    carried: list[list[list[tuple[Block, ResultMessage]]]] = []
    added: list[list[tuple[Block, ResultMessage]]] = []
    before: list[Move] = []
    for t, (step, arriving) in enumerate(zip(plan.steps, plan.receives(rank), strict=True)):
        arrived = [block for block, _, _ in before if block.kind in GRADIENTS and block.home != rank]
        added.append([(block, carrier(block.result(block.kind, rank), t)) for block in arrived])
        carried.append(
            [[(part, carrier(part, t)) for part in plan.remote_results(call, rank)] for call in step.attends[rank]]
        )
        for call, found in ((False, added[t]), (True, chain.from_iterable(carried[t]))):
            for _, message in found:
                computed[message], by_call[message] = t, call
                parts[message] += 1
        before = arriving
    return SentResults(computed, by_call, parts, carried, added)


class _Regions:
    """Regions of send memory. `add` appends one at the offset `end` and moves that behind it."""

    def __init__(self, row_bytes: RowBytes) -> None:
        self._row_bytes = row_bytes
        self.regions: list[Region] = []
        self.end = 0

    def add(self, kind: Kind, heads: Heads, tokens: int) -> int:
        offsets, sizes = [], tuple(self._row_bytes(kind, heads))
        for size in sizes:
            offsets.append(self.end)
            self.end += _aligned(size * tokens)
        self.regions.append(Region(kind, heads, tokens, tuple(offsets), sizes))
        return len(self.regions) - 1

    def num_bytes(self, block: Block) -> int:
        return sum(_aligned(size * block.tokens) for size in self._row_bytes(block.kind, block.heads))


def send_layout(plan: Plan, rank: int, target: Target, computed: dict[ResultMessage, int]) -> SendLayout:
    """Return the layout of the send memory of `rank`. computed: see `SentResults`.

    Blocks that are passed on need a region only if other ranks read this memory.
    """
    memory, sends = _Regions(target.workload.field_bytes), plan.sends(rank)
    packing, packed = _pack_own_rows(sends, rank, memory)
    batches: list[tuple[MessageBatch, list[tuple[Block, int]]]] = []  # with blocks, and destinations of those passed on
    for t, moves in enumerate(sends):
        results = [(block, -1) for block, _, _ in moves if block.kind in RESULTS and block.origin == rank]
        passed = [(block, to) for block, _, to in moves if target.over_peers and _producer(block) != rank]
        for blocks, is_passed in ((results, False), (passed, True)):
            if blocks:
                written = t if is_passed else min(computed[block, t] for block, _ in blocks)
                batches.append(
                    (MessageBatch(t, written, sum(memory.num_bytes(b) for b, _ in blocks), is_passed), blocks)
                )
    base, (offsets, num_bytes, awaited) = memory.end, place([batch for batch, _ in batches])
    regions: dict[tuple[Block, int, int], int] = {}  # keyed by block, step and destination
    for offset, (batch, blocks) in zip(offsets, batches, strict=True):
        memory.end = base + offset
        for block, to in blocks:
            regions[block, batch.step, to] = memory.add(block.kind, block.heads, block.tokens)

    def message(block: Block, t: int, to: int) -> SentMessage:
        if _producer(block) != rank:
            return SentMessage(block, to, regions.get((block, t, to), -1), 0, True)
        if block.kind in RESULTS:
            return SentMessage(block, to, regions[block, t, -1], 0, False)
        own, region, start = next(each for each in packed[block.kind, block.heads] if each.block.contains(block))
        return SentMessage(block, to, region, start + block.start - own.start, False)

    awaits: dict[int, tuple[int, ...]] = {}
    for step, awaiting in sorted(awaited.items()):
        awaits[awaiting] = (*awaits.get(awaiting, ()), step)
    return SendLayout(
        regions=tuple(memory.regions),
        messages=tuple([tuple([message(block, t, to) for block, _, to in moves]) for t, moves in enumerate(sends)]),
        num_bytes=base + num_bytes,
        packing=tuple(map(tuple, packing)),
        results={(block, t): region for (block, t, to), region in regions.items() if to == -1},
        awaits=awaits,
    )


def _pack_own_rows(
    sends: Sequence[Sequence[Move]], rank: int, memory: _Regions
) -> tuple[list[list[Packed]], dict[tuple[Kind, Heads], list[Packed]]]:
    """Add a region for each kind and part of the heads of the own rows that a rank sends.

    Return the rows that are copied into them, indexed by the first step that sends from them, and keyed by kind and
    heads.
    """
    spans: dict[tuple[Kind, Heads], list[tuple[int, int]]] = {}
    first: dict[tuple[Kind, Heads], int] = {}
    for t, moves in enumerate(sends):
        for block, _, _ in moves:
            if block.home == rank and block.kind not in RESULTS:
                spans.setdefault((block.kind, block.heads), []).append((block.start, block.stop))
                first.setdefault((block.kind, block.heads), t)
    by_step: list[list[Packed]] = [[] for _ in sends]
    packed: dict[tuple[Kind, Heads], list[Packed]] = {}
    for kind, heads in sorted(spans, key=lambda key: (key[0], key[1].parts, key[1].part)):
        runs, end = packed.setdefault((kind, heads), []), 0
        for start, stop in merge_spans(spans[kind, heads]):
            runs.append(Packed(Block(kind, rank, start, stop, heads=heads), len(memory.regions), end))
            end += stop - start
        memory.add(kind, heads, end)
        by_step[first[kind, heads]] += runs
    return by_step, packed


def _producer(block: Block) -> int:
    """Return the rank that has computed a result, or that owns an input."""
    return block.origin if block.kind in RESULTS else block.home


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
