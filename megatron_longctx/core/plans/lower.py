"""Lowering of a plan to the programs of its ranks, which makes every decision once, in integers.

It decides which rows share a buffer, which copies are made and when, which messages are read in their senders' memory,
how many partial results wait before they are merged, and in which order operations are issued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .accumulators import Accumulator, by_block, call_results
from .buffers import BufferMap, LiveRange, assign_buffers, live_ranges
from .kernel_calls import PLAINEST, KernelCall, KernelSupport, kernel_calls
from .mask import FAR, Slice, canonical
from .plan import ALL_HEADS, RESULTS, Attend, Block, Heads, Kind, Plan
from .program import (
    Acquire,
    Compute,
    Copy,
    Mark,
    Op,
    Part,
    Program,
    Receive,
    Release,
    Rows,
    Send,
    SendLayout,
    Space,
    Wait,
    rows_read,
)
from .send_layout import ResultMessage, SentResults, send_layout, sent_results
from .workload import Workload

Copies = Sequence[tuple[Rows, Rows]]


@dataclass(frozen=True)
class Target:
    """The workload, kernel and transport that a plan is lowered for."""

    workload: Workload
    takes: KernelSupport = PLAINEST
    hosts: tuple[tuple[int, ...], ...] | None = None
    """For each rank, the ranks that read its memory, itself included. None: all messages are sent point to point."""
    joined: bool = False
    """Whether the keys of a call are always gathered unless contiguous, so that results do not depend, bit for bit, on
    the place of keys in a cache."""

    def peers(self, rank: int) -> frozenset[int]:
        """Return the ranks that read the memory of `rank`."""
        return frozenset() if self.hosts is None else frozenset(self.hosts[rank])


class Lowering:
    """The programs of a plan's ranks on a target, each made on demand."""

    def __init__(self, plan: Plan, target: Target) -> None:
        self.plan, self.target = plan, target
        self.takes = target.takes if plan.backward else target.takes._replace(longest_causal=FAR)
        self._layouts: dict[int, SendLayout] = {}

    def send_layout(self, rank: int, results: SentResults | None = None) -> SendLayout:
        """Return the layout of a rank's send memory. `results` are the rank's, if they are known."""
        if rank not in self._layouts:
            computed = (results or sent_results(self.plan, rank)).computed
            row_bytes, peers = self.target.workload.field_bytes, self.target.peers(rank)
            self._layouts[rank] = send_layout(self.plan, rank, row_bytes, peers, computed)
        return self._layouts[rank]

    def send_bytes(self) -> int:
        """Return the size of the largest send memory of a rank."""
        return max((self.send_layout(rank).num_bytes for rank in range(self.plan.n)), default=0)

    def program(self, rank: int) -> Program:
        return _RankLowering(self, rank).program()


def lower(plan: Plan, rank: int, target: Target) -> Program:
    """Return the program of one rank."""
    return Lowering(plan, target).program(rank)


class _RankLowering:
    """The lowering of one rank."""

    def __init__(self, lowering: Lowering, rank: int) -> None:
        self.lowering, self.rank = lowering, rank
        self.plan, self.target = lowering.plan, lowering.target
        plan, self.peers = self.plan, self.target.peers(rank)
        self.receives, self.results = plan.receives(rank), sent_results(plan, rank)
        self.layout = lowering.send_layout(rank, self.results)
        self.last = len(plan.steps) - 1
        ranges = live_ranges(plan, rank)
        buffer_of, busy_until = assign_buffers(ranges)
        self.after = self._awaited_calls(ranges, busy_until)
        # The results that end a pass are merged in their senders' memory and take no buffers.
        self.merges_in_place = self._is_read_in_place(self.last) and all(
            block.kind in RESULTS and block.home == rank for block, _, _ in self.receives[-1]
        )
        if self.merges_in_place:
            ranges = [each for each in ranges if each.first != self.last]
            buffer_of, _ = assign_buffers(ranges)
        self.ops: list[Op] = []
        self.buffers = BufferMap(rank, ranges, buffer_of, self.ops, self.target.joined)
        self.accumulators: list[Rows] = []
        self.outputs: list[Rows] = []
        self.kept: list[tuple[Rows, ...]] = []
        self.num_kept = self.num_calls = self.num_marks = 0
        self.away: dict[ResultMessage, Accumulator] = {}  # results for other ranks
        self.left = dict(self.results.parts)  # the number of parts that these still lack
        kinds = (Kind.DQ, Kind.DKV) if plan.backward else (Kind.OUT,)
        self.own = {kind: self._new_result(kind, plan.layout_of(kind).num_tokens(rank)) for kind in kinds}

    def program(self) -> Program:
        self._copy(self.layout.packing[0])
        packed = self._mark()
        marks: dict[float, int] = {}  # keyed by step, behind its calls; half a step less, before them
        in_flight = False
        for t, step in enumerate(self.plan.steps):
            if in_flight:
                self.ops.append(Wait(t - 1))
            in_place = self._is_read_in_place(t)
            in_flight = not in_place and self._has_messages(t)
            if in_flight:
                self.ops.append(Send(t, max(packed, marks.get(self.after[t], -1))))
            if t < self.last and self._copy(self.layout.packing[t + 1]):
                packed = self._mark()
            if t and self._add_arrived(t - 1):
                marks[t - 0.5] = self._mark()
            if in_place:
                packed = self._acquire(t)
            else:
                self._copy(self.buffers.own_copies[t])
            for attend, carried in zip(step.attends[self.rank], self.results.carried[t], strict=True):
                self._attend(attend, t, carried)
            marks[t] = self._mark()
        # Results that the last messages do not add to are finished while these are in flight.
        arriving = {block.kind for block, _, _ in self.receives[-1] if in_flight and block.home == self.rank}
        own = {kind: accumulator.finish() for kind, accumulator in self.own.items() if kind not in arriving}
        if in_flight:
            self.ops.append(Wait(self.last))
            self._add_arrived(self.last)
            own |= {kind: accumulator.finish() for kind, accumulator in self.own.items() if kind in arriving}
        elif self.merges_in_place:
            self.ops.append(Release(self.last))
        awaited = {op.after for op in self.ops if type(op) is Send}
        ops = [op for op in self.ops if type(op) is not Mark or op.number in awaited]
        read = [rows for op in ops for rows in rows_read(op)] + [rows for entry in self.kept for rows in entry]
        return Program(
            rank=self.rank,
            num_tokens=self.plan.queries.num_tokens(self.rank),
            backward=self.plan.backward,
            ops=tuple(ops),
            buffers=tuple(self.buffers.buffers),
            sends=self.layout,
            receives=tuple([tuple(self._receives(t)) for t in range(len(self.receives))]),
            passed=tuple([tuple(self._passed(t)) for t in range(len(self.receives))]),
            accumulators=tuple(self.accumulators),
            results=tuple(self.outputs),
            kept=tuple(self.kept),
            own=own,
            reads_own=frozenset(rows.kind for rows in read if rows.space is Space.OWN),
        )

    # Dependencies.

    def _awaited_calls(self, ranges: Sequence[LiveRange], busy_until: Sequence[int]) -> list[float]:
        """Return, for each step, the last step whose calls its messages wait for (-1: none).

        t - 0.5 means that they wait only for the results that are added before the calls of step t.
        """
        after: list[float] = [-1] * len(self.plan.steps)
        for each, until in zip(ranges, busy_until, strict=True):
            after[each.first] = max(after[each.first], until)
        for message, computed in self.results.computed.items():
            calls_follow = not self.results.by_call[message] and self.plan.steps[computed].attends[self.rank]
            _, t = message
            after[t] = max(after[t], computed - 0.5 if calls_follow else computed)
        return after

    def _has_messages(self, t: int) -> bool:
        return bool(self.layout.messages[t] or self.receives[t]) or t in self.layout.awaits

    def _is_read_in_place(self, t: int) -> bool:
        """Whether a step's messages are read in their senders' memory.

        They are if nothing could overlap them: nothing has to be copied before, and nothing is computed between their
        start and the wait for them, nor after what they wait for.
        """
        if not len(self.peers) == self.plan.n > 1 or not self._has_messages(t) or t in self.layout.awaits:
            return False
        passed = any(message.passed for message in self.layout.messages[t])
        return not passed and not self.plan.steps[t].attends[self.rank] and self.after[t] >= t - 1

    # Copies and messages.

    def _copy(self, pairs: Copies) -> bool:
        if pairs:
            self.ops.append(Copy(tuple(pairs)))
        return bool(pairs)

    def _mark(self) -> int:
        self.ops.append(Mark(self.num_marks))
        self.num_marks += 1
        return self.num_marks - 1

    def _acquire(self, t: int) -> int:
        """Read a step's messages in the memory of all peers, together with own rows among them."""
        self.ops.append(Acquire(t))
        found = [
            (block, Rows(Space.PEER, number, block.kind, 0, block.tokens, block.heads, block.heads))
            for number, (block, _, _) in enumerate(self.receives[t])
        ]
        if self.merges_in_place and t == self.last:
            for block, rows in found:
                self.own[block.kind].add(Part(rows, block.start))
            return -1  # they are released once they are merged
        into = self.buffers.received[t]
        self._copy([(into[block], rows) for block, rows in found] + self.buffers.own_copies[t])
        self.ops.append(Release(t))
        return self._mark()

    def _receives(self, t: int) -> Iterator[Receive]:
        coming = {
            source: iter([m for m in self.lowering.send_layout(source).messages[t] if m.peer == self.rank])
            for source in {source for _, source, _ in self.receives[t]} & self.peers
        }
        into = self.buffers.received[t]  # empty if the step's messages are merged in place
        for block, source, _ in self.receives[t]:
            spans: tuple[tuple[int, int], ...] = ()
            if source in self.peers:
                message = next(coming[source])
                spans = self.lowering.send_layout(source).regions[message.region].spans(message.start, block.tokens)
            yield Receive(block, source, into.get(block), spans)

    def _passed(self, t: int) -> list[Rows]:
        return [self.buffers.find(message.block, t) for message in self.layout.messages[t] if message.passed]

    def _add_arrived(self, t: int) -> bool:
        """Add the results that came in step `t`; merge those whose buffers are reused now.

        Returns:
            Whether this rank sends on something of them.
        """
        into = self.buffers.received[t]
        for block, _, _ in self.receives[t]:
            if block.home == self.rank:
                self.own[block.kind].add(Part(into[block], block.start))
        added = self.results.added[t + 1] if t < self.last else []
        for block, message in added:
            self._copy(self._add_to_message(message, [Part(into[block], block.start)]))
        for accumulator in (*self.own.values(), *(self.away[message] for _, message in added if self.left[message])):
            if any(self.buffers.is_overwritten_after(buffer, t + 1) for buffer in accumulator.borrowed):
                accumulator.fold()
        return bool(added)

    # Kernel calls.

    def _attend(self, attend: Attend, t: int, carried: Sequence[tuple[Block, ResultMessage]]) -> None:
        plan, heads = self.plan, attend.heads
        query_blocks, key_blocks = plan.inputs(attend, self.rank)
        keeps_queries, keeps_keys = plan.keeps(self.rank, attend.queries), plan.keeps(self.rank, attend.keys)
        queries = self.buffers.gathered(query_blocks, t, keeps_queries and not plan.backward)
        kept = self._stored(Kind.Q, attend.num_queries, heads) if plan.backward and keeps_queries else None
        if plan.backward and keeps_keys:
            keys = [(self._stored(Kind.KV, attend.num_keys, heads), 0)]
        elif keeps_keys:
            keys = [(self.buffers.gathered(key_blocks, t, True), 0)]
        else:
            keys = self.buffers.key_rows(key_blocks, t)
        calls, results = self._compute(attend, queries, keys, kept)
        if keeps_queries and not plan.backward:
            if [call.q_span for call in calls] == [(0, attend.num_queries)]:
                out = Rows(Space.CALL, self.num_calls - 1, Kind.OUT, 0, attend.num_queries, heads, heads)
            else:  # backward needs it as one
                accumulator = self._new_result(Kind.OUT, attend.num_queries, heads)
                for part in results:
                    accumulator.add(part)
                out = accumulator.finish()
                results = [Part(out, 0)]
            self.kept.append((queries, out))
        if keeps_keys and not plan.backward:
            self.kept.append((keys[0][0],))
        self._add_results(attend, results, carried)

    def _stored(self, kind: Kind, tokens: int, heads: Heads) -> Rows:
        """Return the next rows that forward has kept, in the order in which it did."""
        self.num_kept += 1
        return Rows(Space.KEPT, self.num_kept - 1, kind, 0, tokens, heads, heads)

    def _compute(
        self, attend: Attend, queries: Rows, keys: Sequence[tuple[Rows, int]], kept: Rows | None
    ) -> tuple[list[KernelCall], list[Part]]:
        """Issue the kernel calls of an `Attend` over contiguous rows of keys; return them and their results.

        Args:
            keys: rows, each with the number of its first row among all keys.
        """
        calls: list[KernelCall] = []
        results: list[Part] = []
        for rows, at in keys:
            slices: Sequence[Slice] = canonical(attend.slices) if self.target.joined else attend.slices
            if len(keys) > 1:
                cut = (each.cut(0, attend.num_queries, at, at + rows.tokens) for each in attend.slices)
                slices = [each.moved(0, -at) for each in cut if each is not None]
            for call in kernel_calls(slices, self.lowering.takes):
                (q0, q1), (k0, k1) = call.q_span, call.k_span
                homes = tuple({block.home for block, *_ in by_block(attend.keys, at + k0, at + k1)})
                of_kept = None if kept is None else kept.cut(q0, q1)
                narrow = queries.cut(q0, q1), rows.cut(k0, k1), call.moved(-q0, -k0)
                self.ops.append(Compute(self.num_calls, *narrow, homes, of_kept))
                calls.append(call)
                results += call_results(call, self.num_calls, at, attend.heads, self.plan.backward)
                self.num_calls += 1
        return calls, results

    def _add_results(
        self, attend: Attend, results: Sequence[Part], carried: Sequence[tuple[Block, ResultMessage]]
    ) -> None:
        """Add the results of an `Attend` to this rank's own and to messages for other ranks."""
        away: dict[Block, list[Part]] = {}
        for rows, at in results:
            blocks = attend.keys if rows.kind is Kind.DKV else attend.queries
            for block, start, stop, slot in by_block(blocks, at, at + rows.tokens):
                part = Part(rows.cut(start - at, stop - at), slot)
                if block.home == self.rank:
                    self.own[rows.kind].add(part)
                else:
                    away.setdefault(block.result(rows.kind, -1), []).append(part)
        copies: list[tuple[Rows, Rows]] = []
        for block, message in carried:
            copies += self._add_to_message(message, away.get(block.result(block.kind, -1), []))
        self._copy(copies)

    def _add_to_message(self, message: ResultMessage, parts: list[Part]) -> Copies:
        """Add parts to a result for another rank, and merge it into send memory once it is complete.

        Returns:
            The copy into send memory that a result needs instead if a single part is all of it.
        """
        whole, _ = message
        self.left[message] -= 1
        region = self.layout.results[message]
        into = Rows(Space.SENT, region, whole.kind, 0, whole.tokens, whole.heads, whole.heads)
        if message not in self.away:
            if not self.left[message] and len(parts) == 1 and parts[0].rows.tokens == whole.tokens:
                return [(into, parts[0].rows)]
            self.away[message] = self._new_accumulator(into)
        accumulator = self.away[message]
        for part in parts:
            accumulator.add(part._replace(start=part.start - whole.start))
        if not self.left[message]:
            accumulator.finish()
        return []

    def _new_result(self, kind: Kind, tokens: int, heads: Heads = ALL_HEADS) -> Accumulator:
        into = Rows(Space.RESULT, len(self.outputs), kind, 0, tokens, heads, heads)
        self.outputs.append(into)
        return self._new_accumulator(into)

    def _new_accumulator(self, into: Rows) -> Accumulator:
        self.accumulators.append(into._replace(space=Space.ACCUMULATOR, number=len(self.accumulators)))
        return Accumulator(into, len(self.accumulators) - 1, self.target.workload, self.ops)
