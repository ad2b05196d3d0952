"""The recording of a plan: its steps are gone through once, with rows of memory in place of tensors.

Blocks that arrive together are adjacent in memory, so that calls need not gather them. Results wait until several can
be merged in one pass over memory. How long memory is in use follows from the recorded operations.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

from . import recording as ops
from .kernel_calls import kernel_calls
from .key_copies import KeyCopies, key_copies
from .plan import ALL_HEADS, RESULTS, Attend, Block, Heads, Kind, Plan
from .send_layout import ResultMessage, SendLayout, SentMessage, SentResults, send_layout, sent_results
from .slices import FAR, Slice, canonical
from .workload import Target

LONG_RUN = 2048
"""The length from which a contiguous run of keys has separate kernel calls. Shorter neighbours are gathered."""

Pairs = Sequence[tuple[ops.Rows, ops.Rows]]


class Recorder:
    """The recordings of a plan's ranks on a target, each made on demand."""

    def __init__(self, plan: Plan, target: Target) -> None:
        self.plan, self.target = plan, target
        self.takes = target.takes if plan.backward else target.takes._replace(longest_causal=FAR)
        self.copies_keys = not target.joined and any(each.position for each in plan.mask.documents)  # of a tree
        self._layouts: dict[int, SendLayout] = {}

    def send_layout(self, rank: int, results: SentResults | None = None) -> SendLayout:
        """Return the layout of a rank's send memory. `results` are the rank's, if they are known."""
        if rank not in self._layouts:
            computed = (results or sent_results(self.plan, rank)).computed
            self._layouts[rank] = send_layout(self.plan, rank, self.target, computed)
        return self._layouts[rank]

    def send_bytes(self) -> int:
        """Return the size of the largest send memory of a rank."""
        return max((self.send_layout(rank).num_bytes for rank in range(self.plan.n)), default=0)

    def record(self, rank: int) -> ops.Recording:
        """Return the recording of one rank's pass."""
        return _OfRank(self, rank).record()


def record(plan: Plan, rank: int, target: Target) -> ops.Recording:
    """Return the recording of one rank's pass."""
    return Recorder(plan, target).record(rank)


class _OfRank:
    """The recording of one rank."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self.recorder, self.rank = recorder, rank
        plan, self.target = recorder.plan, recorder.target
        self.plan, self.last = plan, len(plan.steps) - 1
        self.receives, self.results = plan.receives(rank), sent_results(plan, rank)
        self.layout = recorder.send_layout(rank, self.results)
        self.ops: list[ops.Op] = []
        self.sent = [
            ops.Memory(ops.Place.SENT, each.kind, each.tokens, each.heads, i)
            for i, each in enumerate(self.layout.regions)
        ]
        tokens = {kind: plan.layout_of(kind).num_tokens(rank) for kind in Kind}
        self.mine = {kind: ops.Memory(ops.Place.OWN, kind, tokens[kind]) for kind in Kind}
        self.held: dict[tuple[Kind, int], list[tuple[int, Block, ops.Rows]]] = defaultdict(list)
        self.arriving: list[dict[Block, ops.Rows]] = [{} for _ in plan.steps]
        self.with_own = plan.gathered_with_own(rank)
        self.gathered: dict[tuple[Block, ...], ops.Rows] = {}
        self.kept: list[tuple[ops.Rows, ...]] = []
        self.num_kept = 0
        self.away: dict[ResultMessage, ops.Sum] = {}  # results for other ranks
        self.left = dict(self.results.parts)  # the number of parts that these still lack
        kinds = (Kind.DQ, Kind.DKV) if plan.backward else (Kind.OUT,)
        self.own = {kind: self._sum(kind, tokens[kind]) for kind in kinds}

    def record(self) -> ops.Recording:
        self._pack(0)
        in_flight = ends_in_place = False
        for t, step in enumerate(self.plan.steps):
            if in_flight:
                self.ops.append(ops.Wait(t - 1))
            in_place = self._is_read_in_place(t)
            in_flight = not in_place and self._has_messages(t)
            mine = all(block.kind in RESULTS and block.home == self.rank for block, _, _ in self.receives[t])
            ends_in_place = in_place and t == self.last and mine
            own_copies = [] if ends_in_place else self._make_room(t)
            if in_flight:
                self.ops.append(ops.Send(t))
            if t < self.last:
                self._pack(t + 1)
            if t:
                self._add_arrived(t - 1)
            if in_place:
                self._acquire(t, ends_in_place, own_copies)
            else:
                self._copy(own_copies)
            for attend, carried in zip(step.attends[self.rank], self.results.carried[t], strict=True):
                self._attend(attend, t, carried)
        # Results that the last messages do not add to are finished while these are in flight.
        late = {block.kind for block, _, _ in self.receives[-1] if in_flight and block.home == self.rank}
        own = {kind: each.finish() for kind, each in self.own.items() if kind not in late}
        if in_flight:
            self.ops.append(ops.Wait(self.last))
            self._add_arrived(self.last)
            own |= {kind: each.finish() for kind, each in self.own.items() if kind in late}
        elif ends_in_place:
            self.ops.append(ops.Release(self.last))
        self._delay_first_messages()
        receives = tuple(tuple(self._receives(t)) for t in range(len(self.receives)))
        passed = tuple(
            tuple(self._find(m.block, t) for m in messages if m.passed)
            for t, messages in enumerate(self.layout.messages)
        )
        arriving = [[rows.memory for rows in each.values()] for each in self.arriving]
        sent = [[self.sent[m.region] for m in messages if not m.passed] for messages in self.layout.messages]
        after, slots = ops.assign_slots(self.ops, arriving, sent, passed)
        return ops.Recording(
            self.rank, self.plan.queries.num_tokens(self.rank), self.plan.backward, tuple(self.ops), after, slots,
            self.layout, receives, passed, tuple(self.kept), own,
        )  # fmt: skip

    # Messages.

    def _has_messages(self, t: int) -> bool:
        return bool(self.layout.messages[t] or self.receives[t]) or t in self.layout.awaits

    def _is_read_in_place(self, t: int) -> bool:
        """Whether a step's messages are read in their senders' memory.

        They are if nothing could overlap them: nothing has to be copied before, and nothing is computed between their
        start and the wait for them, nor after what they wait for.
        """
        if not self.target.over_peers or not self._has_messages(t) or t in self.layout.awaits:
            return False
        passed = any(message.passed for message in self.layout.messages[t])
        if passed or self.plan.steps[t].attends[self.rank]:
            return False
        return t == 0 or any(u == t and self.results.computed[block, u] == t - 1 for block, u in self.results.computed)

    def _make_room(self, t: int) -> Pairs:
        """Give the blocks of a step memory; return the copies of this rank's own rows among them."""
        groups: dict[tuple[Kind, Heads, bool], list[Block]] = {}
        for block, _, _ in self.receives[t]:
            kept = not self.plan.backward and any(
                map(block.contains, self.plan.kept_of(self.rank, block.kind, block.home))
            )
            groups.setdefault((block.kind, block.heads, kept), []).append(block)
        copies = []
        for (kind, heads, kept), blocks in groups.items():
            together = self.with_own.get((kind, frozenset(blocks)), blocks)
            memory, at = self._new_held(kind, sum(each.tokens for each in together), heads, kept), 0
            for block in together:
                rows, at = memory.rows(at, at + block.tokens), at + block.tokens
                self.held[kind, block.home].append((t, block, rows))
                self.arriving[t].setdefault(block, rows)
                if block.home == self.rank and kind not in RESULTS:
                    copies.append((rows, self.mine[kind].rows(block.start, block.stop, heads)))
        return copies

    def _new_held(self, kind: Kind, tokens: int, heads: Heads, kept: bool = False) -> ops.Memory:
        return ops.Memory(ops.Place.HELD, kind, tokens, heads, -1 if kept else 0)

    def _pack(self, t: int) -> None:
        packing = self.layout.packing[t]
        into = [self.sent[region].rows(start, start + block.tokens) for block, region, start in packing]
        own = [self.mine[block.kind].rows(block.start, block.stop, block.heads) for block, _, _ in packing]
        self._copy(list(zip(into, own, strict=True)))

    def _copy(self, pairs: Pairs) -> None:
        if pairs:
            self.ops.append(ops.Copy(tuple(pairs)))

    def _acquire(self, t: int, ends_in_place: bool, own_copies: Pairs) -> None:
        """Read a step's messages in the memory of all peers, together with own rows among them."""
        blocks = [block for block, _, _ in self.receives[t]]
        peers = tuple(ops.Memory(ops.Place.PEER, b.kind, b.tokens, b.heads, number) for number, b in enumerate(blocks))
        self.ops.append(ops.Acquire(t, peers))
        found = [(block, memory.rows()) for block, memory in zip(blocks, peers, strict=True)]
        if ends_in_place:  # released once they are merged
            for block, rows in found:
                self.own[block.kind].add(ops.Part(rows, block.start))
            return
        self._copy([*((self.arriving[t][block], rows) for block, rows in found), *own_copies])
        self.ops.append(ops.Release(t))

    def _receives(self, t: int) -> Iterator[ops.Receive]:
        coming: dict[int, Iterator[SentMessage]] = {}  # from each rank, in the order of its messages
        for block, source, _ in self.receives[t]:
            spans: tuple[tuple[int, int], ...] = ()
            if self.target.over_peers:
                layout = self.recorder.send_layout(source)
                if source not in coming:
                    coming[source] = iter([m for m in layout.messages[t] if m.peer == self.rank])
                message = next(coming[source])
                spans = layout.regions[message.region].spans(message.start, block.tokens)
            yield ops.Receive(block, source, self.arriving[t].get(block), spans)

    def _delay_first_messages(self) -> None:
        """Start the first messages behind the first kernel call, which then begins earlier."""
        kinds = list(map(type, self.ops))
        if ops.Send in kinds:
            at = kinds.index(ops.Send)
            before = kinds[at : kinds.index(ops.Wait)]
            if self.ops[at].step == 0 and ops.Compute in before:  # type: ignore[union-attr]
                self.ops.insert(at + before.index(ops.Compute), self.ops.pop(at))

    # Blocks.

    def _find(self, block: Block, t: int) -> ops.Rows:
        """Return the rows that hold an input block in step `t`."""
        for arrival, held, rows in reversed(self.held.get((block.kind, block.home), ())):
            if arrival < t and held.contains(block):
                start = rows.start + block.start - held.start
                return ops.Rows(rows.memory, start, start + block.tokens, block.heads)
        if block.home != self.rank:
            raise AssertionError(f"rank {self.rank} does not hold {block} in step {t}: the plan was not verified")
        return self.mine[block.kind].rows(block.start, block.stop, block.heads)

    def _contiguous(self, blocks: Iterable[Block], t: int) -> list[ops.Rows]:
        """Return the rows of blocks, with neighbours in memory joined."""
        found: list[ops.Rows] = []
        for block in blocks:
            rows = self._find(block, t)
            if found and found[-1].memory is rows.memory and found[-1][2:] == (rows.start, rows.heads):
                found[-1] = found[-1]._replace(stop=rows.stop)
            else:
                found.append(rows)
        return found

    def _gather(self, sources: Sequence[ops.Rows], kept: bool = False) -> ops.Rows:
        """Copy rows one behind the other."""
        ends = list(accumulate(rows.tokens for rows in sources))
        memory = self._new_held(sources[0].kind, ends[-1], sources[0].heads, kept)
        self._copy([(memory.rows(end - rows.tokens, end), rows) for rows, end in zip(sources, ends, strict=True)])
        return memory.rows()

    def _gathered(self, blocks: tuple[Block, ...], t: int, kept: bool) -> ops.Rows:
        """Return the contiguous rows of blocks. A copy that this takes serves later calls too."""
        found = self._contiguous(blocks, t)
        if len(found) == 1:
            return found[0]
        if kept or blocks not in self.gathered:
            self.gathered[blocks] = self._gather(found, kept)
        return self.gathered[blocks]

    def _key_rows(self, runs: Sequence[ops.Rows], copies: KeyCopies | None) -> list[tuple[ops.Rows, int]]:
        """Return the keys of a call as contiguous rows, each with the number of its first row among all of the keys.

        Neighbouring short runs are gathered.
        """
        if copies is not None:
            parts = (part for at, tokens in copies.spans for part in ops.by_block(runs, at, at + tokens))
            return [(self._gather([rows._replace(start=at, stop=at + b - a) for rows, a, b, at in parts]), 0)]
        found: list[ops.Rows] = []
        for long, group in groupby(runs, lambda rows: rows.tokens >= LONG_RUN and not self.target.joined):
            some = list(group)
            found += some if long or len(some) == 1 else [self._gather(some)]
        return list(zip(found, accumulate((rows.tokens for rows in found), initial=0), strict=False))

    # Kernel calls and results.

    def _attend(self, attend: Attend, t: int, carried: Sequence[tuple[Block, ResultMessage]]) -> None:
        plan, heads = self.plan, attend.heads
        query_blocks, key_blocks = plan.inputs(attend, self.rank)
        keeps_queries, keeps_keys = plan.keeps(self.rank, attend.queries), plan.keeps(self.rank, attend.keys)
        queries = self._gathered(query_blocks, t, keeps_queries and not plan.backward)
        stored = self._stored(Kind.Q, attend.num_queries, heads) if plan.backward and keeps_queries else None
        if not keeps_keys:
            keys = self._contiguous(key_blocks, t)
        elif plan.backward:
            keys = [self._stored(Kind.KV, attend.num_keys, heads)]
        else:
            keys = [self._gathered(key_blocks, t, True)]
        of = attend.slices, self.recorder.takes, self.target.workload, heads, plan.backward
        copies = key_copies(*of) if self.recorder.copies_keys else None
        spans, results = self._compute(attend, queries, self._key_rows(keys, copies), stored, copies)
        if keeps_queries and not plan.backward:
            out = results[0].rows
            if spans != [(0, attend.num_queries)]:  # backward needs it as one
                total = self._sum(Kind.OUT, attend.num_queries, heads)
                for part in results:
                    total.add(part)
                out = total.finish()
                results = [ops.Part(out, 0)]
            self.kept.append((queries, out.memory.rows()))
        if keeps_keys and not plan.backward:
            self.kept.append((keys[0],))
        self._add_results(attend, results, carried)

    def _stored(self, kind: Kind, tokens: int, heads: Heads) -> ops.Rows:
        """Return the next rows that forward has kept, in the order in which it did."""
        self.num_kept += 1
        return ops.Memory(ops.Place.KEPT, kind, tokens, heads, self.num_kept - 1).rows()

    def _compute(
        self, attend: Attend, queries: ops.Rows, keys: Sequence[tuple[ops.Rows, int]], stored: ops.Rows | None,
        copies: KeyCopies | None,
    ) -> tuple[list[tuple[int, int]], list[ops.Part]]:  # fmt: skip
        """Record the kernel calls of an `Attend` over contiguous rows of keys; return their queries and results.

        keys: rows, each with the number of its first row among all keys; `copies` if there are any.
        """
        spans: list[tuple[int, int]] = []
        results: list[ops.Part] = []
        for rows, at in keys:
            slices: Sequence[Slice] = canonical(attend.slices) if self.target.joined else attend.slices
            if copies is not None:
                slices = copies.slices
            elif len(keys) > 1:
                cut = (each.cut(0, attend.num_queries, at, at + rows.tokens) for each in attend.slices)
                slices = [each.moved(0, -at) for each in cut if each is not None]
            for call in kernel_calls(slices, self.recorder.takes):
                (q0, q1), (k0, k1) = call.q_span, call.k_span
                of = [(k0, k1, at + k0)] if copies is None else [x[1:] for x in ops.by_block(copies.spans, k0, k1)]
                blocks = (x[0] for a, b, key in of for x in ops.by_block(attend.keys, key, key + b - a))
                sizes = [(Kind.DKV, k1 - k0), (Kind.DQ, q1 - q0)] if self.plan.backward else [(Kind.OUT, q1 - q0)]
                outputs = tuple(ops.Memory(ops.Place.CALL, *size, attend.heads) for size in sizes)
                of_kept = None if stored is None else stored.cut(q0, q1)
                moved = queries.cut(q0, q1), rows.cut(k0, k1), call.moved(-q0, -k0)
                self.ops.append(ops.Compute(outputs, *moved, tuple({block.home for block in blocks}), of_kept))
                spans.append((q0, q1))
                if copies is not None and self.plan.backward:
                    results.append(self._sum_copies(outputs[0], of))
                    outputs = outputs[1:]
                results += ops.call_results(call, outputs, at)
        return spans, results

    def _sum_copies(self, copies: ops.Memory, of: Sequence[tuple[int, int, int]]) -> ops.Part:
        """Record the sum of a call's gradients of copied keys. of: runs `start..stop-1` of copies, and their keys."""
        first, last = min(key for *_, key in of), max(key + stop - start for start, stop, key in of)
        into = ops.Memory(ops.Place.CALL, copies.kind, last - first, copies.heads).rows()
        rows = (copies.rows(start - of[0][0], stop - of[0][0]) for start, stop, _ in of)
        self.ops.append(ops.Merge(into, tuple(ops.Part(x, key - first) for x, (*_, key) in zip(rows, of, strict=True))))
        return ops.Part(into, first)

    def _add_results(
        self, attend: Attend, results: Sequence[ops.Part], carried: Sequence[tuple[Block, ResultMessage]]
    ) -> None:
        """Add the results of an `Attend` to this rank's own and to messages for other ranks."""
        away: dict[Block, list[ops.Part]] = {}
        for rows, at in results:
            blocks = attend.keys if rows.kind is Kind.DKV else attend.queries
            for block, start, stop, slot in ops.by_block(blocks, at, at + rows.tokens):
                part = ops.Part(rows.cut(start - at, stop - at), slot)
                if block.home == self.rank:
                    self.own[rows.kind].add(part)
                else:
                    away.setdefault(block.result(rows.kind, -1), []).append(part)
        copies: list[tuple[ops.Rows, ops.Rows]] = []
        for block, message in carried:
            copies += self._add_to_message(message, away.get(block.result(block.kind, -1), []))
        self._copy(copies)

    def _add_arrived(self, t: int) -> None:
        """Add the results that came in step `t`. Merge them now if others come soon after the next step."""
        arriving = self.arriving[t]
        results = {rows.memory for block, rows in arriving.items() if block.kind in RESULTS}
        for block, _, _ in self.receives[t]:
            if block.home == self.rank:
                self.own[block.kind].add(ops.Part(arriving[block], block.start))
        added = self.results.added[t + 1] if t < self.last else []
        for block, message in added:
            self._copy(self._add_to_message(message, [ops.Part(arriving[block], block.start)]))
        later = {(m.block.kind, m.block.heads.parts) for moves in self.receives[t + 2 :] for m in moves}
        reused = {memory for memory in results if (memory.kind, memory.heads.parts) in later}
        for each in (*self.own.values(), *(self.away[message] for _, message in added if self.left[message])):
            if reused and each.holds(reused):
                each.fold()

    def _add_to_message(self, message: ResultMessage, parts: list[ops.Part]) -> Pairs:
        """Add parts to a result for another rank, and merge it into send memory once it is complete.

        If a single part is all of it, return the copy into send memory that it needs instead.
        """
        whole, _ = message
        self.left[message] -= 1
        into = self.sent[self.layout.results[message]].rows()
        if message not in self.away:
            if not self.left[message] and len(parts) == 1 and parts[0].rows.tokens == whole.tokens:
                return [(into, parts[0].rows)]
            self.away[message] = self._sum(whole.kind, whole.tokens, whole.heads, into)
        for part in parts:
            self.away[message].add(part._replace(start=part.start - whole.start))
        if not self.left[message]:
            self.away[message].finish()
        return []

    def _sum(self, kind: Kind, tokens: int, heads: Heads = ALL_HEADS, into: ops.Rows | None = None) -> ops.Sum:
        return ops.Sum(kind, tokens, heads, into, self.target.workload, self.ops)
