"""A symbolic execution of all ranks' recordings, which finds memory that is reused too early.

Rows of inputs hold their names, and rows of results count how often each query-key pair contributed to them. Messages
are as early and as late as recordings allow. They may start once the earlier ones are done and `after` is reached.
Their content is read then, and again when their reader (or a sending rank) waits for them, and both must agree. Rows
that a message is received into hold nothing from its start on. Ranks run ahead of each other as far as they can.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_longctx.core.plans import RESULTS, Block, Heads, Kind, Plan, Recorder, Recording, Target
from megatron_longctx.core.plans.plan import ALL_HEADS
from megatron_longctx.core.plans.recording import (
    Acquire,
    Compute,
    Copy,
    Memory,
    Merge,
    Place,
    Receive,
    Release,
    Rows,
    Send,
    Wait,
)
from megatron_longctx.core.plans.send_layout import SentMessage
from tests.core.plans.masks import pairs_of

Values = NDArray[np.int_]
"""Rows as `[tokens, heads]` names of inputs, or as `[tokens, heads, tokens of the other side]` counts of pairs."""
Kept = list[Values]
NOTHING = -(10**6)
_KINDS = list(Kind)


def interpret(
    plan: Plan, target: Target, kept: Sequence[Kept] | None = None, order: random.Random | None = None
) -> list[Kept]:
    """Run a forward or backward plan and check its results; return what each rank keeps in forward."""
    return _Group(plan, target, kept).run(order or random.Random(0))


class _Group:
    def __init__(self, plan: Plan, target: Target, kept: Sequence[Kept] | None) -> None:
        self.plan, self.work = plan, target.workload
        recorder = Recorder(plan, target)
        self.numbers = {kind: [list(plan.layout_of(kind).tokens(rank)) for rank in range(plan.n)] for kind in Kind}
        self.seen = pairs_of(plan.mask.slices, plan.queries.length, plan.keys.length)
        self.slots = 1 + max(len(of_rank) for of_kind in self.numbers.values() for of_rank in of_kind)
        self.ranks = [
            _Rank(self, recorder.record(rank), kept[rank] if kept is not None else []) for rank in range(plan.n)
        ]

    def run(self, order: random.Random) -> list[Kept]:
        running = {rank.recording.rank: rank.run() for rank in self.ranks}
        while running:
            before = [(rank.at, rank.waits) for rank in self.ranks]
            for number in order.sample(sorted(running), len(running)):
                try:
                    next(running[number])
                except StopIteration:
                    del running[number]
            assert not running or before != [(rank.at, rank.waits) for rank in self.ranks], "ranks wait for each other"
        for rank in self.ranks:
            rank.check()
        return [rank.keep() for rank in self.ranks]

    def names(self, block: Block) -> Values:
        """Return the names of the rows of an input block."""
        heads = np.array(self.work.head_range(block.kind, block.heads))
        slots = np.arange(block.start, block.stop)[:, None]
        return ((_KINDS.index(block.kind) * self.plan.n + block.home) * self.slots + slots) * 1000 + heads

    def tokens(self, kind: Kind, values: Values, heads: Heads) -> tuple[list[int], list[int]]:
        """Return the tokens and homes that rows are named after; -1 for rows of another kind or of other heads."""
        first = self.work.head_range(kind, heads)[0]
        tokens, homes = [], []
        for row in values:
            name, slot = divmod(int(row[0]) // 1000, self.slots)
            of, home = divmod(name, self.plan.n)
            right = (
                row[0] >= 0 and of == _KINDS.index(kind) and list(row % 1000) == [first + i for i in range(len(row))]
            )
            tokens.append(self.numbers[kind][home][slot] if right else -1)
            homes.append(home if right else -1)
        return tokens, homes


class _Rank:
    def __init__(self, group: _Group, recording: Recording, kept: Kept) -> None:
        self.group, self.recording, self.work = group, recording, group.work
        self.kept = kept
        self.at = self.waits = 0
        self.started: set[int] = set()
        self.done: set[int] = set()
        self.memory: dict[Memory | tuple[Place, int, Kind], Values] = {}
        self.sent = np.full(recording.sends.num_bytes, -1)  # for each byte, the index in `written` of its last write
        self.written: list[tuple[int, int, Values]] = []  # (region, row, values)
        self.early: dict[int, list[Values]] = {}  # the messages of each step when they could be read first
        self.late: dict[int, list[Values]] = {}  # the same messages when their sender has waited for them
        self.acquired = -1

    def run(self) -> Iterator[None]:
        starts = self._starts()
        for at, op in enumerate(self.recording.ops):
            self.at = at
            self._may_start(starts.get(at, ()))
            if isinstance(op, Copy):
                values = [self.read(source) for _, source in op.pairs]
                for (into, _), each in zip(op.pairs, values, strict=True):
                    assert (each != NOTHING).all(), op
                    self.write(into, each)
            elif isinstance(op, Merge):
                self._merge(op)
            elif isinstance(op, Compute):
                self._compute(op)
            elif isinstance(op, Send):
                self.early[op.step] += [self.read(rows).copy() for rows in self.recording.passed[op.step]]
            elif isinstance(op, Wait):
                yield from self._exchange(op.step)
            elif isinstance(op, Acquire):
                self.acquired = op.step
                self.early[op.step] = [self._in_region(message) for message in self.messages(op.step)]
                yield from self._start(op.step)
            elif isinstance(op, Release):
                self.done.add(op.step)

    def messages(self, step: int, passed: bool = False) -> list[SentMessage]:
        return [message for message in self.recording.sends.messages[step] if message.passed is passed]

    # Messages.

    def _starts(self) -> dict[int, list[int]]:
        """Return the steps whose messages may start just before an operation, keyed by its index."""
        found: dict[int, list[int]] = {}
        free = 0
        for at, op in enumerate(self.recording.ops):
            if isinstance(op, Wait | Acquire):
                free = at + 1
            elif isinstance(op, Send):
                found.setdefault(max(free, self.recording.after[op.step] + 1), []).append(op.step)
        return found

    def _may_start(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.early[step] = [self._in_region(message) for message in self.messages(step)]
            for receive in self.recording.receives[step]:
                assert receive.into is not None
                self.write(receive.into, np.full_like(self.read(receive.into), NOTHING))

    def _start(self, step: int) -> Iterator[None]:
        for earlier in self.recording.sends.awaits.get(step, ()):
            readers = {message.peer for message in self.recording.sends.messages[earlier]}
            while any(earlier not in self.group.ranks[reader].done for reader in readers):
                yield
        for message, rows in zip(self.messages(step, True), self.recording.passed[step], strict=True):
            if message.region >= 0:
                of = message.block
                self.write(Memory(Place.SENT, of.kind, rows.tokens, of.heads, message.region).rows(), self.read(rows))
        self.late[step] = [self._in_region(message) for message in self.messages(step)]
        self.late[step] += [self.read(rows).copy() for rows in self.recording.passed[step]]
        self.started.add(step)
        self.waits += 1
        senders = {receive.peer for receive in self.recording.receives[step]}
        while any(step not in self.group.ranks[sender].started for sender in senders):
            yield

    def _exchange(self, step: int) -> Iterator[None]:
        yield from self._start(step)
        for receive in self.recording.receives[step]:
            assert receive.into is not None
            self.write(receive.into, self.message(step, receive))
        self.done.add(step)
        self.waits += 1

    def message(self, step: int, receive: Receive) -> Values:
        """Return a received message, which must not have changed since it could be read first."""
        peer = self.group.ranks[receive.peer]
        plain, passed = peer.messages(step), peer.messages(step, True)
        wanted = self.recording.rank, receive.block
        (number,) = [i for i, each in enumerate((*plain, *passed)) if (each.peer, each.block) == wanted]
        found = peer.late[step][number]
        if receive.spans:
            found = peer.at_spans(receive.spans, receive.block.tokens)
        np.testing.assert_array_equal(found, peer.early[step][number])
        assert (found != NOTHING).all()
        if receive.block.kind not in RESULTS:
            np.testing.assert_array_equal(found, self.group.names(receive.block))
        return found

    def _in_region(self, message: SentMessage) -> Values:
        spans = self.recording.sends.regions[message.region].spans(message.start, message.block.tokens)
        return self.at_spans(spans, message.block.tokens)

    def at_spans(self, spans: Sequence[tuple[int, int]], tokens: int) -> Values:
        """Return the rows that are stored in a span of bytes per field."""
        fields = []
        for start, size in spans:
            stamps = self.sent[start : start + size].reshape(tokens, -1)
            assert (stamps == stamps[:, :1]).all() and (stamps >= 0).all(), "rows were overwritten or never written"
            fields.append(stamps[:, 0])
        assert all((field == fields[0]).all() for field in fields), "fields of different rows"
        return np.stack([self.written[stamp][2] for stamp in fields[0]])

    # Rows.

    def _array(self, memory: Memory) -> Values:
        kind, number, recording = memory.kind, memory.number, self.recording
        shared = memory.place in (Place.OWN, Place.KEPT) or (memory.place is Place.HELD and not memory.is_kept)
        key = (memory.place, number, kind) if shared else memory
        if key not in self.memory:
            if memory.place is Place.OWN:
                assert kind not in RESULTS and kind in recording.reads_own
                self.memory[key] = self.group.names(Block(kind, recording.rank, 0, memory.tokens))
            elif memory.place is Place.KEPT:
                self.memory[key] = self.kept[number]
            else:
                tokens = recording.slots[number].tokens if shared else memory.tokens
                self.memory[key] = self.empty(kind, tokens, memory.heads)
        return self.memory[key]

    def empty(self, kind: Kind, tokens: int, heads: Heads) -> Values:
        shape = [tokens, len(self.work.head_range(kind, heads))]
        if kind in RESULTS:
            shape.append(self.group.seen.shape[0 if kind is Kind.DKV else 1])
        return np.full(shape, NOTHING)

    def _heads(self, rows: Rows, held: Heads) -> slice:
        inside, outside = (self.work.head_range(rows.kind, heads) for heads in (rows.heads, held))
        return slice(inside.start - outside.start, inside.stop - outside.start)

    def read(self, rows: Rows) -> Values:
        if rows.memory.place is Place.PEER:
            return self.message(self.acquired, self.recording.receives[self.acquired][rows.memory.number])[
                rows.start : rows.stop
            ]
        array = self._array(rows.memory)
        assert 0 <= rows.start <= rows.stop <= len(array), rows
        return array[rows.start : rows.stop, self._heads(rows, rows.memory.heads)]

    def write(self, rows: Rows, values: Values) -> None:
        if rows.memory.place is not Place.SENT:
            self.read(rows)[...] = values
            return
        region = self.recording.sends.regions[rows.memory.number]
        assert 0 <= rows.start < rows.stop <= region.tokens
        for row, each in zip(range(rows.start, rows.stop), values, strict=True):
            spans = region.spans(row, 1)
            last = self.sent[spans[0][0]]
            whole = self.empty(rows.kind, 1, region.heads)[0]
            if last >= 0 and self.written[last][:2] == (rows.memory.number, row):
                whole = self.written[last][2].copy()
            whole[self._heads(rows, region.heads)] = each
            for start, size in spans:
                self.sent[start : start + size] = len(self.written)
            self.written.append((rows.memory.number, row, whole))

    # Compute.

    def _merge(self, op: Merge) -> None:
        total = np.zeros_like(self.empty(op.into.kind, op.into.tokens, op.into.heads))
        for rows, start in op.parts:
            values = self.read(rows)
            assert (values >= 0).all() and rows.kind is op.into.kind, op
            total[start : start + rows.tokens, self._heads(rows, op.into.heads)] += values
        self.write(op.into, total)

    def _compute(self, op: Compute) -> None:
        backward, heads = self.recording.backward, op.queries.heads
        q_kind = (Kind.Q_GRAD if op.kept is None else Kind.GRAD) if backward else Kind.Q
        assert (op.queries.kind, op.keys.kind) == (q_kind, Kind.KV)
        queries, _ = self.group.tokens(q_kind, self.read(op.queries), heads)
        keys, homes = self.group.tokens(Kind.KV, self.read(op.keys), heads)
        if op.kept is not None:
            assert self.group.tokens(Kind.Q, self.read(op.kept), heads)[0] == queries
        pairs = pairs_of(op.call.slices, len(queries), len(keys))
        assert all(token >= 0 for token, some in zip(queries, pairs.any(axis=1), strict=True) if some), op
        assert all(token >= 0 for token, some in zip(keys, pairs.any(axis=0), strict=True) if some), op
        assert {home for home, some in zip(homes, pairs.any(axis=0), strict=True) if some} <= set(op.homes)
        found = [(Kind.DQ if backward else Kind.OUT, pairs, keys, self.group.seen.shape[1])]
        found += [(Kind.DKV, pairs.T, queries, self.group.seen.shape[0])] if backward else []
        for memory, (kind, mine, others, count) in zip(op.outputs, reversed(found), strict=True):
            other = np.array(others)[:, None] == np.arange(count)
            each = (mine @ other)[:, None].repeat(len(self.work.head_range(kind, heads)), axis=1)
            self.memory[memory] = each

    def check(self) -> None:
        """Check that each visible pair contributed once; to dk and dv once per part of the heads that reads them."""
        parts = max((op.queries.heads.parts for rank in self.group.ranks for op in rank.recording.calls), default=1)
        shared = max(1, parts // self.work.num_kv_heads)
        for kind, rows in self.recording.own.items():
            seen = self.group.seen.T * shared if kind is Kind.DKV else self.group.seen
            mine = seen[self.group.numbers[kind][self.recording.rank]]
            assert rows.heads == ALL_HEADS and rows.start == 0
            if len(mine):
                np.testing.assert_array_equal(self.read(rows), mine[:, None].repeat(self.read(rows).shape[1], axis=1))

    def keep(self) -> Kept:
        """Return what backward reads; the out of kept queries must be complete."""
        found = []
        for rows, *out in self.recording.kept:
            found.append(self.read(rows).copy())
            tokens, _ = self.group.tokens(rows.kind, found[-1], rows.heads)
            assert min(tokens) >= 0
            for each in out:
                whole = self.group.seen[tokens][:, None].repeat(self.read(each).shape[1], axis=1)
                np.testing.assert_array_equal(self.read(each), whole)
        return found
