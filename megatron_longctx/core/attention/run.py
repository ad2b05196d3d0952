"""The execution of a bound program: its operations are issued one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..comm import Exchange, timed
from ..kernels import Partial, merge_partials, sum_partials
from ..kernels.batched_copy import Pair
from ..plans import Kind
from ..plans.plan import NUM_FIELDS
from ..plans.program import Acquire, Compute, Copy, Mark, Merge, Part, Release, Rows, Send, Space, Wait
from .bind import Bound, Fields
from .kv_format import TensorSpec

if TYPE_CHECKING:
    from ..comm import SymmetricExchange


class Run:
    """One pass. Afterwards, `result` returns what it computed, and `kept` what backward needs besides.

    Args:
        own: this rank's own tensors. Forward: Q `(q,)` and KV `(k, v)` or packed `(kv,)`. Backward: Q_GRAD `(q, out,
            grad of out, lse)`, GRAD `(grad of out,)`, and KV. Tensors that the program does not read need no memory.
        kept: the entries that the forward pass kept.
    """

    def __init__(self, bound: Bound, own: dict[Kind, Fields], scale: float, kept: Sequence[Fields] = ()) -> None:
        self._bound, self._program, self._shapes = bound, bound.program, bound.shapes
        self._own, self._scale, self._kept = own, scale, kept
        self._calls: list[Fields] = []
        self._accumulators: list[Fields | None] = [None] * len(self._program.accumulators)
        self._results: list[Fields | None] = [None] * len(self._program.results)
        self._marks: dict[int, Any] = {}
        self._acquired: list[Tensor] = []
        self._first_fields: list[int] = []
        self._exchange: Exchange | None = None

    def __call__(self) -> None:
        """Issue all operations.

        Raises:
            PeerMemoryError: an earlier pass over peer memory was aborted.
        """
        try:
            self._parity = self._bound.begin()
            self._buffers = self._bound.new_buffers()
            with timed(self._bound.runtime.passes):
                for number, op in enumerate(self._program.ops):
                    _HANDLERS[type(op)](self, op, number)
        except BaseException as error:
            if self._bound.runtime.transport is not None:
                self._bound.runtime.transport.abort(error)
            raise

    def result(self, kind: Kind) -> Fields:
        """Return this rank's own results: OUT `(out, lse)`, DQ `(dq,)`, DKV `(dk, dv)`."""
        return self._fields(self._program.own[kind])

    @property
    def kept(self) -> list[Fields]:
        """The entries that the program keeps for backward: (q, out, lse), or packed keys and values."""
        return [tuple(x for rows in entry for x in self._fields(rows)) for entry in self._program.kept]

    # Operations.

    def _copy(self, op: Copy, number: int) -> None:
        pairs = [pair for into, source in op.pairs for pair in self._pairs(into, source)]
        if pairs:
            self._bound.copies.copy(number, pairs)

    def _mark(self, op: Mark, _: int) -> None:
        assert self._bound.runtime.transport is not None
        self._marks[op.number] = self._bound.runtime.transport.record_event()

    def _send(self, op: Send, _: int) -> None:
        assert self._bound.channel is not None
        passed = [x for rows in self._program.passed[op.step] for x in self._fields(rows)]
        receives = self._bound.received(op.step, self._buffers)
        mark = self._marks[op.after]
        self._exchange = self._bound.channel.start(op.step, passed, receives, () if mark is None else (mark,))
        if not self._bound.runtime.overlap:
            self._finish()

    def _wait(self, op: Wait, _: int) -> None:
        if self._exchange is not None:
            self._finish()

    def _finish(self) -> None:
        assert self._bound.channel is not None and self._exchange is not None
        with timed(self._bound.runtime.waits):
            self._bound.channel.wait(self._exchange)
        self._exchange = None

    def _acquire(self, op: Acquire, _: int) -> None:
        channel = cast("SymmetricExchange", self._bound.channel)
        with timed(self._bound.runtime.waits):
            self._acquired = channel.acquire(op.step, self._bound.received(op.step, self._buffers))
        sizes = (NUM_FIELDS[each.block.kind] for each in self._program.receives[op.step])
        self._first_fields = list(accumulate(sizes, initial=0))

    def _release(self, op: Release, _: int) -> None:
        cast("SymmetricExchange", self._bound.channel).release(op.step)

    def _compute(self, op: Compute, _: int) -> None:
        kernel, scale = self._bound.runtime.kernel, self._scale
        k, v = self._keys(op.keys)
        queries = self._fields(op.queries)
        if not self._program.backward:
            self._calls.append(kernel.forward(queries[0], k, v, op.call, scale=scale))
            return
        if op.kept is None:
            q, out, grad_out, lse = queries
        else:
            (grad_out,) = queries
            q, out, lse = self._fields(op.kept)
        self._calls.append(kernel.backward(grad_out, q, k, v, out, lse, op.call, scale=scale))

    def _merge(self, op: Merge, _: int) -> None:
        into = self._separate(op.into)
        first = self._shapes.heads(op.into.kind, op.into.heads).start
        if op.into.kind is Kind.OUT:
            merge_partials([self._partial(part, first, 0) for part in op.parts], into[0], into[1])
            return
        for i, total in enumerate(into):
            sum_partials([self._partial(part, first, i) for part in op.parts], total)

    # Rows as tensors.

    def _fields(self, rows: Rows) -> Fields:
        bound, program, shapes = self._bound, self._program, self._shapes
        match rows.space:
            case Space.BUFFER:
                return bound.buffer_rows(rows, self._buffers)
            case Space.SENT:
                return bound.sent(rows, self._parity)
            case Space.PEER:
                first = self._first_fields[rows.number]
                return tuple(self._acquired[first : first + NUM_FIELDS[rows.kind]])
            case Space.ACCUMULATOR:
                return self._allocated(self._accumulators, program.accumulators, rows, shapes.sum_dtype)
            case Space.RESULT:
                return self._allocated(self._results, program.results, rows, shapes.dtype)
            case Space.OWN:
                fields: Sequence[Tensor] = self._own[rows.kind]
            case Space.CALL:
                fields = self._calls[rows.number]
                if rows.kind is not Kind.OUT:
                    fields = fields[:1] if rows.kind is Kind.DQ else fields[1:]
            case Space.KEPT:
                fields = self._kept[rows.number]
        return tuple(shapes.cut(each, rows) for each in fields)

    def _allocated(self, known: list[Fields | None], wholes: Sequence[Rows], rows: Rows, dtype: torch.dtype) -> Fields:
        """Return rows of a result or total, which is allocated on first use."""
        fields = known[rows.number]
        if fields is None:
            whole = wholes[rows.number]
            specs = self._shapes.result_specs(whole.kind, whole.tokens, whole.heads, dtype)
            fields = known[rows.number] = tuple(_empty_lse(x) if len(x.shape) == 3 else x.empty() for x in specs)
        return tuple(self._shapes.cut(each, rows) for each in fields)

    def _separate(self, rows: Rows) -> Fields:
        """Return rows with gradients of keys and of values as separate fields."""
        fields = self._fields(rows)
        return self._shapes.kv_grad.split(fields[0]) if rows.kind is Kind.DKV and len(fields) == 1 else fields

    def _keys(self, rows: Rows) -> tuple[Tensor, Tensor]:
        fields = self._fields(rows)
        if len(fields) == 2:  # a rank's own keys and values may not be packed
            return fields[0], fields[1]
        return self._shapes.kv.split(fields[0])

    def _pairs(self, into: Rows, source: Rows) -> list[Pair]:
        targets, sources = self._fields(into), self._fields(source)
        if len(targets) == len(sources):
            return list(zip(targets, sources, strict=True))
        if len(sources) == 2:
            kv = self._shapes.kv if into.kind is Kind.KV else self._shapes.kv_grad
            return kv.pairs(targets[0], sources[0], sources[1])
        return list(zip(targets, self._shapes.kv_grad.split(sources[0]), strict=True))

    def _partial(self, part: Part, first: int, number: int) -> Partial:
        fields = self._separate(part.rows)
        head = self._shapes.heads(part.rows.kind, part.rows.heads).start - first
        if part.rows.kind is Kind.OUT:
            return Partial(part.start, head, fields[0], fields[1])
        return Partial(part.start, head, fields[number])


def _empty_lse(spec: TensorSpec) -> Tensor:
    """Return an lse `[s, b, h]` with heads before tokens in memory, the order that kernels want."""
    s, b, h = spec.shape
    return torch.empty((b, h, s), dtype=spec.dtype, device=spec.device).permute(2, 0, 1)


_HANDLERS: dict[type, Any] = {
    Copy: Run._copy,
    Mark: Run._mark,
    Send: Run._send,
    Wait: Run._wait,
    Acquire: Run._acquire,
    Release: Run._release,
    Compute: Run._compute,
    Merge: Run._merge,
}
