"""The replay of a recording: its operations become functions over registers, prepared once for all calls of a kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..comm import BufferPool, Channel, StreamClock, SymmetricExchange, Transport, timed
from ..kernels import AttentionKernel, CopySum, Partial, merge_partials, sum_partials
from ..kernels.batched_copy import BatchedCopy, Rooted
from ..plans import Kind, Recorder
from ..plans import recording as ops
from ..plans.plan import NUM_FIELDS, Block
from .kv_format import Fields, Shapes, TensorSpec
from .registers import EXCHANGE, SCALE, TEMPLATE, Registers, Values, View

Step = Callable[[Values], object]
_RESULTS = frozenset({ops.Place.CALL, ops.Place.SUM, ops.Place.RESULT})


@dataclass
class Runtime:
    """The kernel, transport and memory on which passes run.

    transport: None for a group of one rank. waits, passes: clocks for waiting on messages and for whole passes.
    overlap: False waits for each step's messages as soon as they have started, for ablations.
    """

    kernel: AttentionKernel
    transport: Transport | None
    pool: BufferPool
    waits: StreamClock | None = None
    passes: StreamClock | None = None
    overlap: bool = True

    @property
    def over_peers(self) -> bool:
        """Whether ranks read each other's memory."""
        return self.transport is not None and self.transport.over_peers


class Pass:
    """The forward or backward pass of one kind of call, ready to run. Exchanges nothing, and any thread may make it.

    packed: whether this rank's own keys and values are given as one tensor in their format.
    """

    def __init__(self, recorder: Recorder, rank: int, shapes: Shapes, runtime: Runtime, packed: bool = False) -> None:
        self.recording = recorder.record(rank)
        self._shapes, self._runtime = shapes, runtime
        channel: Channel | None = None
        if runtime.transport is not None:
            channel = runtime.transport.channel(
                self.recording,
                recorder.send_bytes(),
                lambda num_bytes: runtime.pool.get("sent", (num_bytes,), torch.uint8),
            )
        self._channel = cast(SymmetricExchange, channel)  # used for messages alone
        self._registers = Registers(self.recording, shapes, runtime.pool, channel, packed)
        self._steps = self._prepare()
        self._results = {kind: self._registers.fields(rows) for kind, rows in self.recording.own.items()}
        self._kept = [[self._registers.raw(rows) for rows in entry] for entry in self.recording.kept]
        self._own = self._registers.known(Kind)
        self._stored = [(m.number, n) for m, n in self._registers.known(ops.Memory) if m.place is ops.Place.KEPT]

    def run(self, own: dict[Kind, Fields], scale: float, kept: Sequence[Fields] = ()) -> Replay:
        """Run the pass.

        own: this rank's own tensors that the pass reads. Forward: Q `(q,)` and KV `(k, v)` or packed `(kv,)`. Backward:
            Q_GRAD `(q, out, grad of out, lse)`, GRAD `(grad of out,)`, and KV.
        kept: the entries that the forward pass kept.

        Raises RuntimeError: an earlier pass failed, and not because all ranks ran out of memory in it.
        """
        runtime, values = self._runtime, list[Any]()
        try:
            values = self._registers.begin()
            values[SCALE] = scale
            for kind, number in self._own:
                values[number] = own[kind]
            for entry, number in self._stored:
                values[number] = kept[entry]
            with timed(runtime.passes):
                for step in self._steps:
                    step(values)
        except BaseException as error:
            values.clear()  # the rest of the messages may need the memory
            if runtime.transport is not None:
                runtime.transport.abort(error, self._channel, self._sizes)
            raise
        return Replay(self, values)

    def _sizes(self, block: Block) -> list[int]:
        """Return the bytes of a block's fields in a message."""
        return [spec.num_bytes for spec in self._shapes.specs(block.kind, block.tokens, block.heads)]

    def _prepare(self) -> list[Step]:
        """Return the operations as functions, with allocations before the first use of memory, and with marks."""
        recording, ready = self.recording, set[ops.Memory]()
        marks = set(recording.after.values())
        # Messages fill kept memory: they start after the first mark, and so after all earlier uses of the same bytes.
        steps = [self._allocate(memory) for memory in recording.kept_memory]
        if -1 in marks:
            steps.append(self._mark(-1))
        ended = self._last_uses()
        for i, op in enumerate(recording.ops):
            for memory in {rows.memory for rows in ops.rows_written(op)} - ready:
                if memory.place in _RESULTS and not isinstance(op, ops.Compute):  # which allocates its own outputs
                    ready.add(memory)
                    steps.append(self._allocate(memory))
            steps.append(self._step(op))
            if i in ended:
                steps.append(self._clear(ended[i]))
            if i in marks:
                steps.append(self._mark(i))
        return steps

    def _last_uses(self) -> dict[int, list[int]]:
        """Return, keyed by operation, the registers of calls' outputs and sums that nothing needs after it."""
        last: dict[ops.Memory, int] = {}
        for i, op in enumerate(self.recording.ops):
            last |= dict.fromkeys((rows.memory for rows in (*ops.rows_read(op), *ops.rows_written(op))), i)
        remain = {rows.memory for rows in self.recording.own.values()}
        remain |= {rows.memory for entry in self.recording.kept for rows in entry}
        ended: dict[int, list[int]] = {}
        for memory, i in last.items():
            if memory.place in (ops.Place.CALL, ops.Place.SUM) and memory not in remain:
                ended.setdefault(i, []).append(self._registers.number(memory))
        return ended

    def _step(self, op: ops.Op) -> Step:
        match op:
            case ops.Copy():
                return self._copy(op)
            case ops.Compute():
                return self._backward(op) if self.recording.backward else self._forward(op)
            case ops.Merge():
                return self._merge(op)
            case ops.Send():
                return self._send(op)
            case ops.Wait():
                return self._wait
            case ops.Acquire():
                return self._acquire(op)
            case ops.Release():
                return lambda _: self._channel.release(op.step)

    # Memory.

    def _clear(self, numbers: Sequence[int]) -> Step:
        def clear(values: Values) -> None:
            for number in numbers:
                values[number] = None

        return clear

    def _allocate(self, memory: ops.Memory) -> Step:
        number, shapes = self._registers.number(memory), self._shapes
        if memory.place is ops.Place.HELD:
            makers = [spec.empty for spec in shapes.specs(memory.kind, memory.tokens, memory.heads)]
        else:
            dtype = shapes.sum_dtype if memory.place is ops.Place.SUM else shapes.dtype
            specs = shapes.result_specs(memory.kind, memory.tokens, memory.heads, dtype)
            makers = [_empty_lse(spec) if len(spec.shape) == 3 else spec.empty for spec in specs]

        def allocate(values: Values) -> None:
            values[number] = tuple([make() for make in makers])

        return allocate

    def _copy(self, op: ops.Copy) -> Step:
        registers, copies, sides = self._registers, BatchedCopy(), list[tuple[View, ...]]()
        for pair in op.pairs:
            alike = len({registers.is_packed(rows.memory) for rows in pair}) == 1
            sides.append(tuple([registers.view(x, not alike and registers.is_packed(x.memory)) for x in pair]))
        moving, fixed = ([*dict.fromkeys(x.number for y in sides for x in y if x.fixed is z)] for z in (False, True))

        def copy(values: Values) -> None:
            first = [x for i in moving for x in values[i]]
            copies.copy([*first, *[x for i in fixed for x in values[i]]], len(first), lambda: pairs(values))

        def pairs(values: Values) -> list[Rooted]:
            roots = [(i, field) for i in (*moving, *fixed) for field in range(len(values[i]))]

            def fields(of: View) -> list[tuple[Tensor, int]]:  # packed keys and values have one root
                last = len(values[of.number]) - 1
                return [(x, roots.index((of.number, min(i, last)))) for i, x in enumerate(of.get(values))]

            found = [both for pair in sides for both in zip(*map(fields, pair), strict=True)]
            return [((into, source), (to, of)) for (into, to), (source, of) in found]

        return copy

    # Kernel calls and results.

    def _forward(self, op: ops.Compute) -> Step:
        run, call, number = self._runtime.kernel.forward, op.call, self._registers.number(op.outputs[0])
        queries, keys = self._registers.raw(op.queries), self._registers.fields(op.keys)

        def forward(values: Values) -> None:
            k, v = keys(values)
            values[number] = run(queries(values)[0], k, v, call, scale=values[SCALE])

        return forward

    def _backward(self, op: ops.Compute) -> Step:
        run, call = self._runtime.kernel.backward, op.call
        of_keys, of_queries = map(self._registers.number, op.outputs)
        queries, keys = self._registers.raw(op.queries), self._registers.fields(op.keys)
        kept = None if op.kept is None else self._registers.raw(op.kept)

        def backward(values: Values) -> None:
            k, v = keys(values)
            if kept is None:
                q, out, grad_out, lse = queries(values)
            else:
                (grad_out,), (q, out, lse) = queries(values), kept(values)
            dq, *dkv = run(grad_out, q, k, v, out, lse, call, scale=values[SCALE])
            values[of_queries], values[of_keys] = (dq,), dkv

        return backward

    def _merge(self, op: ops.Merge) -> Step:
        if op.into.memory.place is ops.Place.CALL:
            return self._sum_copies(op)
        kind, into, heads = op.into.kind, self._registers.fields(op.into), self._shapes.heads
        first = heads(kind, op.into.heads).start
        parts = [
            (start, heads(kind, rows.heads).start - first, self._registers.fields(rows)) for rows, start in op.parts
        ]

        def merge(values: Values) -> None:
            found = [(start, head, get(values)) for start, head, get in parts]
            if kind is Kind.OUT:
                merge_partials([Partial(start, head, *fields) for start, head, fields in found], *into(values))
                return
            for i, total in enumerate(into(values)):
                sum_partials([Partial(start, head, fields[i]) for start, head, fields in found], total)

        return merge

    def _sum_copies(self, op: ops.Merge) -> Step:
        copies, into = map(self._registers.fields, (op.parts[0].rows.memory.rows(), op.into))
        total = CopySum([(start, rows.tokens) for rows, start in op.parts])
        return lambda values: [total(*fields) for fields in zip(copies(values), into(values), strict=True)]

    # Messages.

    def _mark(self, i: int) -> Step:
        number, transport = self._registers.number(("mark", i)), self._runtime.transport
        assert transport is not None

        def mark(values: Values) -> None:
            event = transport.record_event()
            values[number] = () if event is None else (event,)

        return mark

    def _send(self, op: ops.Send) -> Step:
        channel, step, overlap, wait = self._channel, op.step, self._runtime.overlap, self._wait
        into = [cast(ops.Rows, each.into) for each in self.recording.receives[step]]
        passed, receives = map(self._registers.tensors, (self.recording.passed[step], into))
        mark = self._registers.number(("mark", self.recording.after[step]))

        def send(values: Values) -> None:
            values[EXCHANGE] = channel.start(step, passed(values), receives(values), values[mark])
            if not overlap:
                wait(values)

        return send

    def _wait(self, values: Values) -> None:
        exchange = values[EXCHANGE]
        if exchange is not None:  # otherwise awaited already
            with timed(self._runtime.waits):
                self._channel.wait(exchange)
            values[EXCHANGE] = None

    def _acquire(self, op: ops.Acquire) -> Step:
        channel, filled = self._channel, self._registers.number(("acquired", op.step))
        blocks = [each.block for each in self.recording.receives[op.step]]
        specs = [spec for each in blocks for spec in self._shapes.specs(each.kind, each.tokens, each.heads)]

        def acquire(values: Values) -> None:
            with timed(self._runtime.waits):
                found = channel.acquire(op.step, specs)
            if found and values[filled] is not found[0]:  # the first time since memory has moved
                with torch.inference_mode(False):
                    fill(values, found)

        def fill(values: Values, found: list[Tensor]) -> None:
            template, left = values[TEMPLATE], iter(found)
            for memory in op.peers:
                whole = tuple(next(left) for _ in range(NUM_FIELDS[memory.kind]))
                for number, view in self._registers.of_peers.get(memory, ()):
                    template[number] = values[number] = view(whole)
            template[filled] = found[0]

        return acquire


class Replay:
    """What a pass has computed."""

    def __init__(self, of: Pass, values: Values) -> None:
        self._of, self._values = of, values

    def result(self, kind: Kind) -> Fields:
        """Return this rank's own results: OUT `(out, lse)`, DQ `(dq,)`, DKV `(dk, dv)`."""
        return tuple(self._of._results[kind](self._values))

    @property
    def kept(self) -> list[Fields]:
        """The entries that the pass keeps for backward: (q, out, lse), or packed keys and values."""
        return [tuple(x for get in entry for x in get(self._values)) for entry in self._of._kept]


def _empty_lse(spec: TensorSpec) -> Callable[[], Tensor]:
    """Return what makes an lse `[s, b, h]` with heads before tokens in memory, the order that kernels want."""
    s, b, h = spec.shape
    return lambda: torch.empty((b, h, s), dtype=spec.dtype, device=spec.device).permute(2, 0, 1)
