"""From a plan to the programs of its ranks: every decision, made once, in integers.

Rules that live here and nowhere else: which rows share a buffer, what is copied and when, which messages are read where
their senders have them, how many partial results wait before they are merged, and what is issued in which order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from .kernel_calls import kernel_calls
from .liveness import LiveRange, assign, live_ranges
from .made import Made, in_blocks
from .mask import FAR, Slice, canonical
from .places import Places, narrow
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
    used_marks,
)
from .send_layout import Carrier, ResultsSent, results_sent, send_layout
from .target import Target
from .totals import Total


class Lowering:
    """A plan for a target; programs are made as they are asked for."""

    def __init__(self, plan: Plan, target: Target) -> None:
        self.plan, self.target = plan, target
        self.takes = target.takes if plan.backward else target.takes._replace(longest_causal=FAR)
        self._layouts: dict[int, SendLayout] = {}

    def send_layout(self, rank: int, results: ResultsSent | None = None) -> SendLayout:
        """Where all that a rank sends lies. results: of the rank, where they are known."""
        if rank not in self._layouts:
            computed = (results or results_sent(self.plan, rank)).computed
            row_bytes, peers = self.target.workload.field_bytes, self.target.peers(rank)
            self._layouts[rank] = send_layout(self.plan, rank, row_bytes, peers, computed)
        return self._layouts[rank]

    def send_bytes(self) -> int:
        """Of the rank with the most send memory."""
        return max((self.send_layout(rank).num_bytes for rank in range(self.plan.n)), default=0)

    def program(self, rank: int) -> Program:
        return _Lowered(self, rank).program()


def lower(plan: Plan, rank: int, target: Target) -> Program:
    """The program of one rank."""
    return Lowering(plan, target).program(rank)


class _Lowered:
    """The lowering of one rank."""

    def __init__(self, lowering: Lowering, rank: int) -> None:
        self.lowering, self.rank = lowering, rank
        self.plan, self.target = lowering.plan, lowering.target
        plan, peers = self.plan, self.target.peers(rank)
        self.sends, self.receives = plan.sends(rank), plan.receives(rank)
        self.results = results_sent(plan, rank)
        self.layout = lowering.send_layout(rank, self.results)
        self.reads_all = len(peers) == plan.n > 1
        ranges = live_ranges(plan, rank)
        buffer_of, busy_until = assign(ranges)
        self.after = self._waits(ranges, busy_until)
        # Results that end the pass are merged where their senders have them.
        self.last_is_read = self._at_once(len(plan.steps) - 1) and all(
            block.kind in RESULTS and block.home == rank for block, _, _ in self.receives[-1]
        )
        if self.last_is_read:
            ranges = [each for each in ranges if each.first != len(plan.steps) - 1]
            buffer_of, _ = assign(ranges)
        self.ops: list[Op] = []
        self.places = Places(rank, ranges, buffer_of, self.ops, self.target.joined)
        self.totals: list[Rows] = []
        self.outputs: list[Rows] = []
        self.kept: list[tuple[Rows, ...]] = []
        self.num_kept = self.num_calls = self.num_marks = 0
        self.away: dict[Carrier, Total] = {}
        self.left = dict(self.results.parts)  # calls that have still to add to a result for another rank
        kinds = (Kind.DQ, Kind.DKV) if plan.backward else (Kind.OUT,)
        self.own = {kind: self._total(kind, plan.layout_of(kind).num_tokens(rank)) for kind in kinds}

    def program(self) -> Program:
        plan = self.plan
        last = len(plan.steps) - 1
        self._publish(0)
        packed = self._mark()
        marks: dict[float, int] = {}
        under_way = False
        for t, step in enumerate(plan.steps):
            if under_way:
                self.ops.append(Wait(t - 1))
            at_once = self._at_once(t)
            under_way = not at_once and self._exchanges(t)
            if under_way:
                after = self.after[t]
                self.ops.append(Send(t, max(packed, marks.get(after, -1))))
            if t < last and self._publish(t + 1):
                packed = self._mark()
            if t and self._arrived(t - 1):
                marks[t - 0.5] = self._mark()
            if at_once:
                packed = self._acquire(t)
            else:
                self._copy(self.places.own_among(t))
            for attend, carried in zip(step.attends[self.rank], self.results.carried[t], strict=True):
                self._attend(attend, t, carried)
            marks[t] = self._mark()
        if under_way:
            arriving = {block.kind for block, _, _ in self.receives[last] if block.home == self.rank}
            own = {kind: total.finish(self.ops) for kind, total in self.own.items() if kind not in arriving}
            self.ops.append(Wait(last))
            self._arrived(last)
            own |= {kind: total.finish(self.ops) for kind, total in self.own.items() if kind in arriving}
        else:
            own = {kind: total.finish(self.ops) for kind, total in self.own.items()}
            if self.last_is_read:
                self.ops.append(Release(last))
        return self._finished(own)

    def _finished(self, own: dict[Kind, Rows]) -> Program:
        ops = used_marks(self.ops)
        reads = {rows.kind for rows in rows_read(ops, self.kept) if rows.space is Space.OWN}
        return Program(
            rank=self.rank,
            num_tokens=self.plan.queries.num_tokens(self.rank),
            backward=self.plan.backward,
            ops=tuple(ops),
            buffers=tuple(self.places.buffers),
            sends=self.layout,
            receives=self._receives(),
            passed=self._passed(),
            totals=tuple(self.totals),
            results=tuple(self.outputs),
            kept=tuple(self.kept),
            own=own,
            reads_own=frozenset(reads),
        )

    # What depends on what.

    def _waits(self, ranges: Sequence[LiveRange], busy_until: Sequence[int]) -> list[float]:
        """By step, the last step whose calls its messages have to wait for (-1: none), or half a step less where they
        wait only for what is added up before these."""
        after: list[float] = [-1] * len(self.plan.steps)
        for each, until in zip(ranges, busy_until, strict=True):
            after[each.first] = max(after[each.first], until)
        for message, computed in self.results.computed.items():
            _, t = message
            calls_follow = not self.results.by_call[message] and self.plan.steps[computed].attends[self.rank]
            after[t] = max(after[t], computed - 0.5 if calls_follow else computed)
        return after

    def _exchanges(self, t: int) -> bool:
        return bool(self.sends[t] or self.receives[t]) or t in self.layout.awaits

    def _at_once(self, t: int) -> bool:
        """Whether a step's messages are read where the senders have them: nothing is computed between their start and
        the waiting for them, nor after what they wait for, and nothing has to be copied before."""
        if not self.reads_all or t < 0 or not self._exchanges(t) or t in self.layout.awaits:
            return False
        passed = any(message.passed for message in self.layout.messages[t])
        return not passed and not self.plan.steps[t].attends[self.rank] and self.after[t] >= t - 1

    # Copies and messages.

    def _copy(self, pairs: Iterable[tuple[Rows, Rows]]) -> bool:
        found = tuple(pairs)
        if found:
            self.ops.append(Copy(found))
        return bool(found)

    def _mark(self) -> int:
        self.ops.append(Mark(self.num_marks))
        self.num_marks += 1
        return self.num_marks - 1

    def _publish(self, t: int) -> bool:
        """Copy what a step is the first to send of this rank's own tensors to where it is sent from."""
        pairs = []
        for region, spans in self.layout.published[t]:
            kind, heads, *_ = self.layout.regions[region]
            at = 0
            for start, stop in spans:
                into = Rows(Space.SENT, region, kind, at, at + stop - start, heads, heads)
                pairs.append((into, Rows(Space.OWN, 0, kind, start, stop, heads)))
                at += stop - start
        return self._copy(pairs)

    def _acquire(self, t: int) -> int:
        """Read a step's messages from all peers at once, own rows with them."""
        self.ops.append(Acquire(t))
        moves = self.receives[t]
        if self.last_is_read and t == len(self.plan.steps) - 1:
            for number, (block, _, _) in enumerate(moves):
                self.own[block.kind].add(Part(_of_peer(number, block), block.start), self.ops)
            return -1  # released once they are merged
        into = self.places.into(t)
        pairs = [(into[block], _of_peer(number, block)) for number, (block, _, _) in enumerate(moves)]
        self._copy([*pairs, *self.places.own_among(t)])
        self.ops.append(Release(t))
        return self._mark()

    def _receives(self) -> tuple[tuple[Receive, ...], ...]:
        peers = self.target.peers(self.rank)
        found = []
        for t, moves in enumerate(self.receives):
            coming = {
                source: [m for m in self.lowering.send_layout(source).messages[t] if m.peer == self.rank]
                for source in {source for _, source, _ in moves if source in peers}
            }
            taken: dict[int, int] = defaultdict(int)
            of_step = []
            into = {} if self.last_is_read and t == len(self.receives) - 1 else self.places.into(t)
            for block, source, _ in moves:
                spans: tuple[tuple[int, int], ...] = ()
                if source in peers:
                    message = coming[source][taken[source]]
                    taken[source] += 1
                    region = self.lowering.send_layout(source).regions[message.region]
                    spans = region.spans(message.start, block.tokens)
                of_step.append(Receive(block, source, into.get(block), spans))
            found.append(tuple(of_step))
        return tuple(found)

    def _passed(self) -> tuple[tuple[Rows, ...], ...]:
        """By step, where what is passed on lies."""
        return tuple(
            tuple(self.places.find(message.block, t) for message in messages if message.passed)
            for t, messages in enumerate(self.layout.messages)
        )

    def _arrived(self, t: int) -> bool:
        """Take in the results that came in step `t`; those whose buffers are used again are merged now. Says whether
        something of it goes on from here."""
        into = self.places.into(t)
        for block, _, _ in self.receives[t]:
            if block.home == self.rank:  # a result
                self.own[block.kind].add(Part(into[block], block.start), self.ops)
        added = self.results.added[t + 1] if t + 1 < len(self.plan.steps) else []
        for block, key in added:
            self.left[key] -= 1
            self._copy(self._send_result(key, [Part(into[block], block.start)]))
        for total in (*self.own.values(), *(self.away[key] for _, key in added if self.left[key])):
            if any(self.places.is_received_after(buffer, t + 1) for buffer in total.borrowed):
                total.fold(self.ops)
        return bool(added)

    # Calls.

    def _attend(self, attend: Attend, t: int, carried: Sequence[tuple[Block, Carrier]]) -> None:
        plan, rank = self.plan, self.rank
        query_blocks, key_blocks = plan.inputs(attend, rank)
        keeps = plan.keeps(rank, attend.queries), plan.keeps(rank, attend.keys)
        queries = self.places.joined(query_blocks, t, keeps[0] and not plan.backward)
        kept: Rows | None = None
        if plan.backward and keeps[0]:
            kept = self._stored(Kind.Q, attend.num_queries, attend.heads)
        if plan.backward and keeps[1]:
            keys = [(self._stored(Kind.KV, attend.num_keys, attend.heads), 0)]
        elif keeps[1]:
            keys = [(self.places.joined(key_blocks, t, True), 0)]
        else:
            keys = self.places.key_rows(key_blocks, t)
        outs: list[Made] = []
        for rows, at in keys:
            slices: Iterable[Slice] = canonical(attend.slices) if self.target.joined else attend.slices
            if len(keys) > 1:
                cut = (each.cut(0, attend.num_queries, at, at + rows.tokens) for each in attend.slices)
                slices = [each.moved(0, -at) for each in cut if each is not None]
            for call in kernel_calls(slices, self.lowering.takes):
                outs.append(Made(self.num_calls, call, at))
                (q0, q1), (k0, k1) = call.q_span, call.k_span
                narrowed = call.moved(-q0, -k0)
                of_queries, of_keys = narrow(queries, q0, q1), narrow(rows, k0, k1)
                of_kept = None if kept is None else narrow(kept, q0, q1)
                homes = tuple({block.home for block, *_ in in_blocks(attend.keys, at + k0, at + k1)})
                self.ops.append(Compute(self.num_calls, of_queries, of_keys, narrowed, homes, of_kept))
                self.num_calls += 1
        if not plan.backward and any(keeps):
            outs = self._keep(attend, keeps, queries, keys, outs)
        self._hand_out(attend, outs, carried)

    def _keep(
        self, attend: Attend, keeps: tuple[bool, bool], queries: Rows, keys: list[tuple[Rows, int]], outs: list[Made]
    ) -> list[Made]:
        """Note what backward needs of a call; its output is brought together where several kernel calls gave it."""
        if keeps[0]:
            whole = (0, attend.num_queries)
            out = Rows(Space.CALL, outs[0].number, Kind.OUT, *whole, attend.heads, attend.heads)
            if len(outs) > 1 or outs[0].call.q_span != whole:
                total = self._total(Kind.OUT, attend.num_queries, attend.heads)
                for made in outs:
                    for start, stop in made.q_clusters:
                        total.add(Part(made.queries(Kind.OUT, start, stop, attend.heads), start), self.ops)
                out = total.finish(self.ops)
                outs = [Made(out.number, outs[0].call, 0, out)]
            self.kept.append((queries, out))
        if keeps[1]:
            self.kept.append((keys[0][0],))
        return outs

    def _stored(self, kind: Kind, tokens: int, heads: Heads) -> Rows:
        """What forward has kept next, in the order in which it did."""
        self.num_kept += 1
        return Rows(Space.KEPT, self.num_kept - 1, kind, 0, tokens, heads, heads)

    def _hand_out(self, attend: Attend, outs: list[Made], carried: Sequence[tuple[Block, Carrier]]) -> None:
        """Give the results of a call to this rank's totals, or bring them to where they are sent from."""
        pieces: dict[Block, list[Part]] = {}
        backward, heads = self.plan.backward, attend.heads
        for made in outs:
            if backward:
                for start, stop in made.k_clusters:
                    for block, low, high, first in in_blocks(attend.keys, made.at + start, made.at + stop):
                        rows = made.keys(low - made.at, high - made.at, heads)
                        self._give(block.result(Kind.DKV, -1), rows, first, pieces)
            kind = Kind.DQ if backward else Kind.OUT
            for start, stop in made.q_clusters:
                for block, low, high, first in in_blocks(attend.queries, start, stop):
                    self._give(block.result(kind, -1), made.queries(kind, low, high, heads), first, pieces)
        copies: list[tuple[Rows, Rows]] = []
        for block, key in carried:
            self.left[key] -= 1
            copies += self._send_result(key, pieces.get(block.result(block.kind, -1), []))
        self._copy(copies)

    def _give(self, block: Block, rows: Rows, first: int, pieces: dict[Block, list[Part]]) -> None:
        if block.home == self.rank:
            self.own[block.kind].add(Part(rows, first), self.ops)
        else:
            pieces.setdefault(block, []).append(Part(rows, first))

    def _send_result(self, key: Carrier, parts: list[Part]) -> list[tuple[Rows, Rows]]:
        """Add parts to a result for another rank; what one call has computed whole is copied to where it is sent from,
        anything else is brought together once all is there."""
        whole, _ = key
        region = self.layout.results[key]
        into = Rows(Space.SENT, region, whole.kind, 0, whole.tokens, whole.heads, whole.heads)
        if key not in self.away and not self.left[key] and len(parts) == 1 and parts[0].rows.tokens == whole.tokens:
            return [(into, parts[0].rows)]
        if key not in self.away:
            self.totals.append(into._replace(space=Space.TOTAL, number=len(self.totals)))
            self.away[key] = Total(into, len(self.totals) - 1, self.target.workload)
        total = self.away[key]
        for part in parts:
            total.add(part._replace(start=part.start - whole.start), self.ops)
        if not self.left[key]:
            total.finish(self.ops)
        return []

    def _total(self, kind: Kind, tokens: int, heads: Heads = ALL_HEADS) -> Total:
        into = Rows(Space.RESULT, len(self.outputs), kind, 0, tokens, heads, heads)
        self.outputs.append(into)
        self.totals.append(into._replace(space=Space.TOTAL, number=len(self.totals)))
        return Total(into, len(self.totals) - 1, self.target.workload)


def _of_peer(number: int, block: Block) -> Rows:
    return Rows(Space.PEER, number, block.kind, 0, block.tokens, block.heads, block.heads)
