"""The replay of a recording: its operations become functions over registers, prepared once for all calls of a kind.

A register has the tensors of a memory, or rows of one. Memory that runs share (what peers send, what this rank sends)
does not move between calls, so its registers are filled once. The others are filled by the operations of a call, and
cleared after the last one that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from ..comm import Exchange, SymmetricExchange
from ..kernels import Partial, merge_partials, sum_partials
from ..kernels.batched_copy import BatchedCopy, Pair
from ..schedules import Heads, Kind, Lowering
from ..schedules.plan import NUM_FIELDS
from ..schedules.record import record
from ..schedules.recording import (
    Acquire,
    Compute,
    Copy,
    Memory,
    Merge,
    Op,
    Place,
    Recording,
    Release,
    Rows,
    Send,
    Wait,
    rows_read,
    rows_written,
)
from .bind import Fields, Runtime, Shapes
from .kv_format import TensorSpec

Registers = list[Any]
Step = Callable[[Registers], None]
Get = Callable[[Registers], Fields]

_PACKED = frozenset({Place.HELD, Place.SENT, Place.PEER, Place.KEPT})
"""The places where a block has the fields of its messages: keys and values, or their gradients, are one."""
_SHARED = frozenset({Place.HELD, Place.SENT, Place.PEER})
_ALIGNMENT = 256
_TEMPLATE, _SCALE, _EXCHANGE = 0, 1, 2


class Pass:
    """The forward or backward pass of one kind of call, ready to run. Exchanges nothing, and any thread may make it.

    Args:
        packed: whether this rank's own keys and values are given as one tensor in their format.
        calls_first: see `record`.
    """

    def __init__(
        self,
        lowering: Lowering,
        rank: int,
        shapes: Shapes,
        runtime: Runtime,
        packed: bool = False,
        calls_first: bool = False,
    ) -> None:
        self.program: Recording = record(lowering, rank, calls_first)
        self._shapes, self._runtime, self._packed = shapes, runtime, packed
        self._copies = BatchedCopy()
        self._channel = None
        if runtime.transport is not None:
            self._channel = runtime.transport.channel(
                self.program,  # type: ignore[arg-type]
                lowering.send_bytes(),
                lambda num_bytes: runtime.pool.get("sent", (num_bytes,), torch.uint8),
            )
        self._registers: dict[Any, int] = dict.fromkeys(("template", "scale", "exchange"), 0)
        self._registers = {key: i for i, key in enumerate(self._registers)}
        self._shared: list[tuple[int, Callable[[int], Any]]] = []  # registers, and what fills them, given the parity
        self._steps = self._prepare()
        self._own = {kind: self._fields(rows) for kind, rows in self.program.own.items()}
        self._kept = [
            [self._raw(rows) if rows.kind is Kind.KV else self._fields(rows) for rows in entry]
            for entry in self.program.kept
        ]
        self._templates: list[Registers | None] = [None, None]
        self._generation = (-1, -1)

    def run(self, own: dict[Kind, Fields], scale: float, kept: Sequence[Fields] = ()) -> Replay:
        """Run the pass; see `Run` for the arguments.

        Raises:
            PeerMemoryError: an earlier pass over peer memory was aborted.
        """
        runtime = self._runtime
        try:
            registers = self._begin(own, scale, kept)
            clock = runtime.passes if runtime.passes is not None and runtime.passes.running else None
            if clock is not None:
                clock.start()
            for step in self._steps:
                step(registers)
            if clock is not None:
                clock.stop()
        except BaseException as error:
            if runtime.transport is not None:
                runtime.transport.abort(error)
            raise
        return Replay(self, registers)

    def _begin(self, own: dict[Kind, Fields], scale: float, kept: Sequence[Fields]) -> Registers:
        channel, pool = self._channel, self._runtime.pool
        parity = 0 if channel is None else channel.begin()
        now = pool.generation, 0 if channel is None else channel.generation
        while now != self._generation:  # shared memory has moved
            self._templates, self._generation = [None, None], now
            self._memory()
            now = pool.generation, 0 if channel is None else channel.generation
        template = self._templates[parity] or self._template(parity)
        registers = template.copy()
        registers[_TEMPLATE], registers[_SCALE] = template, scale
        for kind, number in self._own_registers:
            registers[number] = own[kind]
        for entry, number in self._kept_registers:
            registers[number] = kept[entry]
        return registers

    # Shared memory.

    def _memory(self) -> tuple[Tensor, Tensor | None]:
        """Return the memory of held blocks, and that of blocks to send."""
        held = self._runtime.pool.get("held", (self._held_bytes,), torch.uint8)
        return held, None if self._channel is None else self._channel.memory()

    def _template(self, parity: int) -> Registers:
        template: Registers = [None] * len(self._registers)
        self._templates[parity] = template
        with torch.inference_mode(False):  # later runs use the views too
            memory = self._memory()
            for number, fill in self._shared:
                template[number] = fill(memory)
        return template

    def _whole(self, memory: Memory, of: tuple[Tensor, Tensor | None]) -> Fields:
        """Return the fields of shared memory, as they are sent."""
        specs = self._shapes.specs(memory.kind, memory.tokens, memory.heads)
        if memory.place is Place.HELD:
            storage, offsets = of[0], self._offsets[memory.number]
        else:
            storage, offsets = cast(Tensor, of[1]), self.program.sends.regions[memory.number].offsets
        sizes = [prod(spec.shape) * spec.dtype.itemsize for spec in specs]
        return tuple(
            storage[at : at + size].view(spec.dtype).view(spec.shape)
            for at, size, spec in zip(offsets, sizes, specs, strict=True)
        )

    def _place_slots(self) -> None:
        self._offsets, end = list[list[int]](), 0
        for kind, parts, tokens in self.program.slots:
            self._offsets.append([])
            for spec in self._shapes.specs(kind, tokens, Heads(0, parts)):
                self._offsets[-1].append(end)
                end += -(-prod(spec.shape) * spec.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._held_bytes = end

    # Registers.

    def _register(self, key: Any) -> int:
        return self._registers.setdefault(key, len(self._registers))

    def _is_shared(self, memory: Memory) -> bool:
        return memory.place in _SHARED and (memory.place is not Place.HELD or memory.number >= 0)

    def _is_packed(self, memory: Memory) -> bool:
        if memory.kind not in (Kind.KV, Kind.DKV):
            return False
        return self._packed if memory.place is Place.OWN else memory.place in _PACKED

    def _raw(self, rows: Rows) -> Get:
        """Return what gets rows with the fields that their memory has."""
        return self._getter(rows, split=False)

    def _fields(self, rows: Rows) -> Get:
        """Return what gets rows with keys and values, or their gradients, as separate fields."""
        return self._getter(rows, split=self._is_packed(rows.memory))

    def _getter(self, rows: Rows, split: bool) -> Get:
        memory, cut = rows.memory, self._cut(rows)
        form = self._shapes.kv if memory.kind is Kind.KV else self._shapes.kv_grad
        if self._is_shared(memory):
            decode = split and not form.splits_into_views  # the content changes, so it is decoded anew
            key = rows, split and not decode
            if key not in self._registers:
                number = self._register(key)

                def of(fields: Fields) -> Fields:
                    found = fields if cut is None else cut(fields)
                    return form.split(found[0]) if key[1] else found

                if memory.place is Place.PEER:
                    self._read_in_place.setdefault(memory, []).append((number, of))
                else:
                    self._shared.append((number, lambda of_memory: of(self._whole(memory, of_memory))))
            number = self._registers[key]
            return (lambda registers: form.split(registers[number][0])) if decode else itemgetter(number)
        number = self._register(memory if memory.place is not Place.OWN else memory.kind)
        if not split:
            return itemgetter(number) if cut is None else lambda registers: cut(registers[number])
        if cut is None:
            return lambda registers: form.split(registers[number][0])
        return lambda registers: form.split(cut(registers[number])[0])

    def _cut(self, rows: Rows) -> Callable[[Fields], Fields] | None:
        """Return what cuts rows out of the fields of their memory; None if they are all of it."""
        memory, (_, start, stop, heads) = rows.memory, rows
        wanted, first = self._shapes.heads(memory.kind, heads), self._shapes.heads(memory.kind, memory.heads).start
        all_rows, length = rows.tokens == memory.tokens, stop - start
        if heads == memory.heads:
            return None if all_rows else lambda fields: tuple([x.narrow(0, start, length) for x in fields])
        head, count = wanted.start - first, len(wanted)

        def cut(fields: Fields) -> Fields:
            # An lse [t, b, h] has no dimension after its heads.
            found = [x.narrow(2 if x.ndim == 3 else x.ndim - 2, head, count) for x in fields]
            return tuple(found if all_rows else [x.narrow(0, start, length) for x in found])

        return cut

    # Operations as functions.

    def _prepare(self) -> list[Step]:
        self._place_slots()
        self._read_in_place: dict[Memory, list[tuple[int, Callable[[Fields], Fields]]]] = {}
        program, steps, ready = self.program, list[Step](), set[Memory]()
        marks = set(program.after.values())
        last: dict[Memory, int] = {}
        for i, op in enumerate(program.ops):
            for rows in (*rows_read(op), *rows_written(op)):
                last[rows.memory] = i
        remain = {rows.memory for rows in (*program.own.values(), *(rows for entry in program.kept for rows in entry))}
        # Messages fill kept memory: they start after the mark below, and so after all earlier uses of the same bytes.
        arriving = [each.into for receives in program.receives for each in receives if each.into is not None]
        written = [rows for op in program.ops for rows in rows_written(op)]
        for memory in dict.fromkeys(cast(Rows, rows).memory for rows in (*arriving, *written)):
            if memory.place is Place.HELD and memory.number < 0:
                steps.append(self._allocate(memory))
        if -1 in marks:
            steps.append(self._mark(-1))
        for i, op in enumerate(program.ops):
            for memory in {rows.memory for rows in rows_written(op)} - ready:
                if memory.place in (Place.SUM, Place.RESULT):
                    ready.add(memory)
                    steps.append(self._allocate(memory))
            steps.append(self._step(op, i))
            ended = [memory for memory, at in last.items() if at == i and memory not in remain]
            done = [self._register(m) for m in ended if m.place in (Place.CALL, Place.SUM)]
            if done:
                steps.append(self._clear(done))
            if i in marks:
                steps.append(self._mark(i))
        kinds = [kind for kind in Kind if kind in self._registers]
        self._own_registers = [(kind, self._registers[kind]) for kind in kinds]
        entries = [key for key in self._registers if isinstance(key, Memory) and key.place is Place.KEPT]
        self._kept_registers = [(memory.number, self._registers[memory]) for memory in entries]
        return steps

    def _step(self, op: Op, i: int) -> Step:
        match op:
            case Copy():
                return self._copy(op, i)
            case Compute():
                return self._compute(op)
            case Merge():
                return self._merge(op)
            case Send():
                return self._send(op)
            case Wait():
                return self._wait()
            case Acquire():
                return self._acquire(op)
            case Release():
                channel, step = cast(SymmetricExchange, self._channel), op.step
                return lambda _: channel.release(step)

    def _mark(self, i: int) -> Step:
        number, transport = self._register(("mark", i)), self._runtime.transport
        assert transport is not None

        def mark(registers: Registers) -> None:
            event = transport.record_event()
            registers[number] = () if event is None else (event,)

        return mark

    def _clear(self, numbers: Sequence[int]) -> Step:
        def clear(registers: Registers) -> None:
            for number in numbers:
                registers[number] = None

        return clear

    def _allocate(self, memory: Memory) -> Step:
        number, shapes = self._register(memory), self._shapes
        if memory.place is Place.HELD:
            specs = shapes.specs(memory.kind, memory.tokens, memory.heads)
        else:
            dtype = shapes.sum_dtype if memory.place is Place.SUM else shapes.dtype
            specs = shapes.result_specs(memory.kind, memory.tokens, memory.heads, dtype)
        made = [_empty_lse(x) if memory.place is not Place.HELD and len(x.shape) == 3 else x.empty for x in specs]

        def allocate(registers: Registers) -> None:
            registers[number] = tuple([make() for make in made])

        return allocate

    def _copy(self, op: Copy, i: int) -> Step:
        both: list[tuple[Get, Get]] = []
        for into, source in op.pairs:
            alike = self._is_packed(into.memory) == self._is_packed(source.memory)
            get = self._raw if alike else self._fields
            both.append((get(into), get(source)))
        copies = self._copies

        def copy(registers: Registers) -> None:
            pairs: list[Pair] = []
            for into, source in both:
                pairs += zip(into(registers), source(registers), strict=True)
            copies.copy(i, pairs)

        return copy

    def _compute(self, op: Compute) -> Step:
        kernel, call = self._runtime.kernel, op.call
        queries, keys = self._raw(op.queries), self._fields(op.keys)
        outputs = [self._register(memory) for memory in op.outputs]
        if not self.program.backward:
            (out,) = outputs

            def forward(registers: Registers) -> None:
                k, v = keys(registers)
                registers[out] = kernel.forward(queries(registers)[0], k, v, call, scale=registers[_SCALE])

            return forward
        of_keys, of_queries = outputs
        kept = None if op.kept is None else self._raw(op.kept)

        def backward(registers: Registers) -> None:
            k, v = keys(registers)
            if kept is None:
                q, out, grad_out, lse = queries(registers)
            else:
                (grad_out,), (q, out, lse) = queries(registers), kept(registers)
            dq, *dkv = kernel.backward(grad_out, q, k, v, out, lse, call, scale=registers[_SCALE])
            registers[of_queries], registers[of_keys] = (dq,), tuple(dkv)

        return backward

    def _merge(self, op: Merge) -> Step:
        kind, into = op.into.kind, self._fields(op.into)
        first = self._shapes.heads(kind, op.into.heads).start
        parts = [
            (self._fields(rows), start, self._shapes.heads(kind, rows.heads).start - first) for rows, start in op.parts
        ]

        def merge(registers: Registers) -> None:
            found = [(start, head, get(registers)) for get, start, head in parts]
            if kind is Kind.OUT:
                merge_partials([Partial(start, head, *fields) for start, head, fields in found], *into(registers))
                return
            for number, total in enumerate(into(registers)):
                sum_partials([Partial(start, head, fields[number]) for start, head, fields in found], total)

        return merge

    # Messages.

    def _send(self, op: Send) -> Step:
        channel, step, overlap = self._channel, op.step, self._runtime.overlap
        assert channel is not None
        passed, receives = self._tensors(self.program.passed[step]), self._targets(step)
        mark, wait = self._register(("mark", self.program.after[step])), self._wait()

        def send(registers: Registers) -> None:
            registers[_EXCHANGE] = channel.start(step, passed(registers), receives(registers), registers[mark])
            if not overlap:
                wait(registers)

        return send

    def _tensors(self, rows: Sequence[Rows]) -> Callable[[Registers], list[Tensor]]:
        """Return what gets the tensors of messages."""
        gets = [self._raw(each) for each in rows]
        if not all(self._is_shared(each.memory) for each in rows):
            return lambda registers: [x for get in gets for x in get(registers)]
        number = self._register(("messages", *rows))
        self._shared.append((number, lambda memory: [x for each in rows for x in self._view(each, memory)]))
        return itemgetter(number)

    def _view(self, rows: Rows, memory: tuple[Tensor, Tensor | None]) -> Fields:
        cut, fields = self._cut(rows), self._whole(rows.memory, memory)
        return fields if cut is None else cut(fields)

    def _targets(self, step: int) -> Callable[[Registers], Any]:
        """Return what gets the targets of a step's messages, or their shapes if they are read in the peers' memory."""
        receives = self.program.receives[step]
        if all(each.into is not None for each in receives):
            return self._tensors([cast(Rows, each.into) for each in receives])
        specs: list[TensorSpec] = []
        for block, *_ in receives:
            specs += self._shapes.specs(block.kind, block.tokens, block.heads)
        return lambda _: specs

    def _wait(self) -> Step:
        channel, clock = self._channel, self._runtime.waits
        assert channel is not None

        def wait(registers: Registers) -> None:
            exchange: Exchange | None = registers[_EXCHANGE]
            if exchange is None:  # awaited already
                return
            if clock is not None and clock.running:
                clock.start()
                channel.wait(exchange)
                clock.stop()
            else:
                channel.wait(exchange)
            registers[_EXCHANGE] = None

        return wait

    def _acquire(self, op: Acquire) -> Step:
        channel, step, clock = cast(SymmetricExchange, self._channel), op.step, self._runtime.waits
        receives, views = self._targets(step), self._read_in_place
        sizes = [NUM_FIELDS[each.block.kind] for each in self.program.receives[step]]
        filled = self._register(("acquired", step))

        def acquire(registers: Registers) -> None:
            running = clock is not None and clock.running
            if running:
                clock.start()  # type: ignore[union-attr]
            found = channel.acquire(step, receives(registers))
            if running:
                clock.stop()  # type: ignore[union-attr]
            if not found or registers[filled] is found[0]:
                return
            template, whole, at = registers[_TEMPLATE], list[Fields](), 0
            for size in sizes:
                whole.append(tuple(found[at : at + size]))
                at += size
            with torch.inference_mode(False):
                for memory in op.peers:
                    for number, of in views.get(memory, ()):
                        template[number] = registers[number] = of(whole[memory.number])
            template[filled] = found[0]

        return acquire


class Replay:
    """What a pass has computed."""

    def __init__(self, of: Pass, registers: Registers) -> None:
        self._of, self._registers = of, registers

    def result(self, kind: Kind) -> Fields:
        """Return this rank's own results: OUT `(out, lse)`, DQ `(dq,)`, DKV `(dk, dv)`."""
        return self._of._own[kind](self._registers)

    @property
    def kept(self) -> list[Fields]:
        """The entries that the pass keeps for backward: (q, out, lse), or packed keys and values."""
        return [tuple(x for get in entry for x in get(self._registers)) for entry in self._of._kept]


def _empty_lse(spec: TensorSpec) -> Callable[[], Tensor]:
    """Return what makes an lse `[s, b, h]` with heads before tokens in memory, the order that kernels want."""
    s, b, h = spec.shape
    return lambda: torch.empty((b, h, s), dtype=spec.dtype, device=spec.device).permute(2, 0, 1)
