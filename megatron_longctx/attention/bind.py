"""A program with tensors: the rows of buffers and send memory found once, for all runs over the same shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..comm import BufferPool, Channel, StreamClock, Transport
from ..kernels import AttentionKernel
from ..kernels.batched_copy import BatchedCopy
from ..schedules import Heads, Kind, Lowering
from ..schedules.plan import NUM_FIELDS, Block
from ..schedules.program import Program, Rows, Space
from .kv_format import Like
from .shapes import Shapes

Fields = tuple[Tensor, ...]
"""The tensors of one kind of rows, all with tokens first."""


@dataclass
class Engine:
    """What programs run on.

    transport: None for a group of one rank. waits, passes: measure the waiting for messages, and whole passes.
    overlap: False waits for each step's messages as soon as they have started, for ablations.
    """

    kernel: AttentionKernel
    transport: Transport | None
    pool: BufferPool
    waits: StreamClock | None = None
    passes: StreamClock | None = None
    overlap: bool = True


@dataclass
class Bound:
    """A program over given shapes on an engine: what all its runs share.

    channel: None for a rank alone. copies: plans its batched copies. kept_at: by number, where what forward has kept
    begins among the kept tensors.
    """

    program: Program
    shapes: Shapes
    engine: Engine
    channel: Channel | None
    copies: BatchedCopy = field(default_factory=BatchedCopy)
    kept_at: tuple[int, ...] = ()
    _buffers: list[Fields | None] = field(default_factory=list)
    _known: dict[Any, Any] = field(default_factory=dict)
    _generation: tuple[int, int] = (-1, -1)

    def begin(self) -> int:
        """Start a pass on the caller's stream; returns which of the send memories it uses."""
        parity = 0 if self.channel is None else self.channel.begin()
        pool, found = self.engine.pool, self._generation
        while found != (pool.generation, 0 if self.channel is None else self.channel.generation):
            self._known.clear()
            self._buffers = [self._shared(number) for number in range(len(self.program.buffers))]
            if self.channel is not None:
                self.channel.memory()
            found = self._generation = pool.generation, 0 if self.channel is None else self.channel.generation
        return parity

    def new_buffers(self) -> list[Fields]:
        """Every buffer; those that backward needs are this run's own."""
        return [self._new(number) if fields is None else fields for number, fields in enumerate(self._buffers)]

    def sent(self, rows: Rows, parity: int) -> Fields:
        """Rows of the send memory."""
        key = rows, parity
        found = self._known.get(key)
        if found is None:
            assert self.channel is not None
            region, memory = self.program.sends.regions[rows.number], self.channel.memory()
            likes = self.shapes.like(rows.kind, rows.tokens, rows.heads)
            with torch.inference_mode(False):  # they outlive the call that asks first
                found = self._known[key] = tuple(
                    memory[offset : offset + size].view(like.dtype).view(like.shape)
                    for (offset, size), like in zip(region.spans(rows.start, rows.tokens), likes, strict=True)
                )
        return found

    def received(self, step: int, buffers: Sequence[Fields]) -> Sequence[Tensor]:
        """What a step's messages are received into, or look like where they are read in the peers' memory."""
        found = self._known.get(step)
        if found is None:
            receives = self.program.receives[step]
            found = [x for each in receives for x in self._place(each.into, each.block, buffers)]
            if all(each.into is None or not self.program.buffers[each.into.number].kept for each in receives):
                self._known[step] = found
        return found

    def buffer_rows(self, rows: Rows, buffers: Sequence[Fields]) -> Fields:
        """Rows of a buffer."""
        found = self._known.get(rows)
        if found is None:
            with torch.inference_mode(False):
                found = tuple(self.shapes.cut(each, rows) for each in buffers[rows.number])
            if not self.program.buffers[rows.number].kept:
                self._known[rows] = found
        return found

    def _place(self, into: Rows | None, block: Block, buffers: Sequence[Fields]) -> Sequence[Any]:
        if into is None:
            return self.shapes.like(block.kind, block.tokens, block.heads)
        return self.buffer_rows(into, buffers)

    def _likes(self, number: int) -> tuple[Like, ...]:
        kind, tokens, parts, _ = self.program.buffers[number]
        return self.shapes.like(kind, tokens, Heads(0, parts))

    def _shared(self, number: int) -> Fields | None:
        buffer, name = self.program.buffers[number], self.program.buffer_names[number]
        if buffer.kept:
            return None
        return tuple(
            self.engine.pool.get((buffer.kind, buffer.parts, name, i), like.shape, like.dtype)
            for i, like in enumerate(self._likes(number))
        )

    def _new(self, number: int) -> Fields:
        return tuple(like.empty() for like in self._likes(number))


def bind(lowering: Lowering, rank: int, shapes: Shapes, engine: Engine) -> Bound:
    """The program of a rank, ready to run. Nothing is exchanged; safe on another thread than the one that runs it."""
    program = lowering.program(rank)
    channel = None
    if engine.transport is not None:
        pool = engine.pool

        def memory(num_bytes: int) -> Tensor:
            return pool.get("sent", (num_bytes,), torch.uint8)

        channel = engine.transport.channel(program, lowering.send_bytes(), memory)
    return Bound(program, shapes, engine, channel, kept_at=_kept_at(program))


def first_field(program: Program, step: int) -> list[int]:
    """By receive of a step, the number of its first field among all of the step's; at last, of them all."""
    return list(accumulate((NUM_FIELDS[each.block.kind] for each in program.receives[step]), initial=0))


def _kept_at(program: Program) -> tuple[int, ...]:
    """By number of what forward has kept, its first tensor: of queries (q, out, lse), of keys one."""
    read = (rows for call in program.calls for rows in (call.kept, call.keys) if rows and rows.space is Space.KEPT)
    kinds = {rows.number: rows.kind for rows in read}
    counts = (3 if kinds[number] is Kind.Q else 1 for number in sorted(kinds))
    return tuple(accumulate(counts, initial=0))
