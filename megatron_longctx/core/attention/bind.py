"""A program with its tensors: rows of buffers and send memory, found once for all runs over the same shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import BufferPool, Channel, StreamClock, Transport
from ..kernels import AttentionKernel
from ..kernels.batched_copy import BatchedCopy
from ..kernels.interface import sum_dtype
from ..plans import Heads, Kind, Lowering, Workload
from ..plans.plan import FIELDS
from ..plans.program import Program, Rows
from .kv_format import KVFormat, TensorSpec

Fields = tuple[Tensor, ...]
"""The tensors of one kind of rows, all token first."""


class Shapes(NamedTuple):
    """The shapes and dtypes of all rows in passes over one workload.

    kv: the format in which keys and values are stored and sent. kv_grad: the format of their gradients.
    """

    workload: Workload
    dtype: torch.dtype
    device: torch.device
    kv: KVFormat
    kv_grad: KVFormat

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of accumulators and of log-sum-exps."""
        return sum_dtype(self.dtype)

    def heads(self, kind: Kind, part: Heads) -> range:
        """Return the heads of a part among all heads of a kind."""
        return self.workload.head_range(kind, part)

    def specs(self, kind: Kind, tokens: int, heads: Heads) -> tuple[TensorSpec, ...]:
        """Return the fields of `tokens` rows for a part of the heads, as they are sent."""
        return _specs(self, kind, tokens, heads)

    def result_specs(self, kind: Kind, tokens: int, heads: Heads, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """Return the fields of results as they are computed: (out, lse), (dq) or (dk, dv)."""
        if kind is Kind.DKV:
            work, count = self.workload, len(self.heads(kind, heads))
            shapes = [(tokens, work.batch, count, size) for size in (work.head_dim, work.value_dim)]
            return tuple(TensorSpec(shape, dtype, self.device) for shape in shapes)
        value, *lse = self.specs(kind, tokens, heads)
        return value._replace(dtype=dtype), *lse

    def cut(self, field: Tensor, rows: Rows) -> Tensor:
        """Cut `rows` out of a field that has the rows' `held` heads."""
        if rows.heads != rows.held:
            wanted, first = self.heads(rows.kind, rows.heads), self.heads(rows.kind, rows.held).start
            dim = 2 if field.ndim == 3 else field.ndim - 2  # an lse [t, b, h] has no dimension after its heads
            field = field.narrow(dim, wanted.start - first, len(wanted))
        return field if rows.tokens == field.shape[0] else field.narrow(0, rows.start, rows.tokens)


@lru_cache(maxsize=1024)
def _specs(shapes: Shapes, kind: Kind, tokens: int, heads: Heads) -> tuple[TensorSpec, ...]:
    work, device = shapes.workload, shapes.device
    rows = tokens, work.batch, len(shapes.heads(kind, heads))
    if kind in (Kind.KV, Kind.DKV):
        return ((shapes.kv if kind is Kind.KV else shapes.kv_grad).spec(*rows, device),)
    fields = {
        "q": TensorSpec((*rows, work.head_dim), shapes.dtype, device),
        "out": TensorSpec((*rows, work.value_dim), shapes.dtype, device),
        "lse": TensorSpec(rows, shapes.sum_dtype, device),
    }
    return tuple(fields[name] for name in FIELDS[kind])


@dataclass
class Runtime:
    """The kernel, transport and memory on which programs run.

    transport: None for a group of one rank. waits, passes: clocks for waiting on messages and for whole passes.
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
    """A program bound to shapes and a runtime: the state that all its runs share.

    channel: None for one rank alone. copies: plans of batched copies.
    """

    program: Program
    shapes: Shapes
    runtime: Runtime
    channel: Channel | None
    copies: BatchedCopy = field(default_factory=BatchedCopy)
    _buffers: list[Fields | None] = field(default_factory=list)
    _known: dict[Any, Any] = field(default_factory=dict)
    _generation: tuple[int, int] = (-1, -1)

    def begin(self) -> int:
        """Start a pass on the current stream; return which of the send memories it uses."""
        parity = 0 if self.channel is None else self.channel.begin()
        pool, bound_to = self.runtime.pool, self._generation
        while bound_to != (pool.generation, 0 if self.channel is None else self.channel.generation):
            self._known.clear()
            self._buffers = [self._shared_buffer(number) for number in range(len(self.program.buffers))]
            if self.channel is not None:
                self.channel.memory()
            bound_to = self._generation = pool.generation, 0 if self.channel is None else self.channel.generation
        return parity

    def new_buffers(self) -> list[Fields]:
        """Return every buffer; those that backward needs are allocated for this run alone."""
        return [
            tuple(spec.empty() for spec in self._buffer_specs(number)) if fields is None else fields
            for number, fields in enumerate(self._buffers)
        ]

    def sent(self, rows: Rows, parity: int) -> Fields:
        """Return rows of the send memory."""
        key = rows, parity
        fields = self._known.get(key)
        if fields is None:
            assert self.channel is not None
            region, memory = self.program.sends.regions[rows.number], self.channel.memory()
            specs = self.shapes.specs(rows.kind, rows.tokens, rows.heads)
            with torch.inference_mode(False):  # later runs use the views too
                fields = self._known[key] = tuple(
                    memory[offset : offset + size].view(spec.dtype).view(spec.shape)
                    for (offset, size), spec in zip(region.spans(rows.start, rows.tokens), specs, strict=True)
                )
        return fields

    def received(self, step: int, buffers: Sequence[Fields]) -> Sequence[Tensor]:
        """Return the targets of a step's messages, or their shapes if they are read in the peers' memory."""
        fields = self._known.get(step)
        if fields is None:
            receives = self.program.receives[step]
            fields = []
            for block, _, into, _ in receives:
                if into is None:
                    fields += self.shapes.specs(block.kind, block.tokens, block.heads)
                else:
                    fields += self.buffer_rows(into, buffers)
            if all(each.into is None or not self.program.buffers[each.into.number].kept for each in receives):
                self._known[step] = fields
        return fields

    def buffer_rows(self, rows: Rows, buffers: Sequence[Fields]) -> Fields:
        """Return rows of a buffer."""
        fields = self._known.get(rows)
        if fields is None:
            with torch.inference_mode(False):
                fields = tuple(self.shapes.cut(each, rows) for each in buffers[rows.number])
            if not self.program.buffers[rows.number].kept:
                self._known[rows] = fields
        return fields

    def _buffer_specs(self, number: int) -> tuple[TensorSpec, ...]:
        kind, tokens, parts, _ = self.program.buffers[number]
        return self.shapes.specs(kind, tokens, Heads(0, parts))

    def _shared_buffer(self, number: int) -> Fields | None:
        buffer, name = self.program.buffers[number], self.program.buffer_names[number]
        if buffer.kept:
            return None
        return tuple(
            self.runtime.pool.get((buffer.kind, buffer.parts, name, i), spec.shape, spec.dtype)
            for i, spec in enumerate(self._buffer_specs(number))
        )


def bind(lowering: Lowering, rank: int, shapes: Shapes, runtime: Runtime) -> Bound:
    """Bind a rank's program, ready to run. Exchanges nothing, and may be called from any thread."""
    program = lowering.program(rank)
    channel = None
    if runtime.transport is not None:
        channel = runtime.transport.channel(
            program, lowering.send_bytes(), lambda num_bytes: runtime.pool.get("sent", (num_bytes,), torch.uint8)
        )
    return Bound(program, shapes, runtime, channel)
