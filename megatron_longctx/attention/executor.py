"""Follows a program: starts its messages, calls its kernels, merges its results."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import BufferPool, Exchange, P2PTransport
from ..kernels import AttentionKernel
from ..schedules import RESULTS, Block, Kind
from .accumulate import MergedOutput, Sum
from .program import HOME, Call, Place, Program, ProgramStep, Receive

Fields = tuple[Tensor, ...]
"""The tensors of one kind of block, all with tokens first. KV is one tensor `[t, 2, b, g, d]`."""


@dataclass(frozen=True)
class Engine:
    """What a program runs on. `transport` is None for a group of one rank."""

    kernel: AttentionKernel
    transport: P2PTransport | None
    pool: BufferPool


class _Pass:
    """One run of a program. Subclasses say what a kernel call computes and where arrived results go."""

    def __init__(self, program: Program, engine: Engine, home: dict[Kind, Fields], scale: float) -> None:
        self._program = program
        self._engine = engine
        self._home = home
        self._scale = scale
        self._slots: list[Fields] = []
        self._to_send: dict[Kind, Fields] = {}
        self._outgoing: dict[Block, list[Fields]] = defaultdict(list)

    def run(self) -> None:
        transport = self._engine.transport
        if transport is None:
            for step in self._program.steps:
                for call in step.calls:
                    self.attend(call)
            return
        self._slots = [self._slot(i, kind, tokens) for i, (kind, tokens) in enumerate(self._program.slots)]
        # Copied before the mark that the messages wait for, never between it and the sending.
        places = (send.place for step in self._program.steps for send in step.sends)
        kinds = {place.kind for place in places if place is not None and place.slot == HOME}
        self._to_send = {kind: tuple(field.contiguous() for field in self._home[kind]) for kind in kinds}
        begin = transport.now()
        exchange: Exchange | None = None
        arrived: tuple[Receive, ...] = ()
        marks: list[torch.cuda.Event | None] = []
        for step in self._program.steps:
            if exchange is not None:
                transport.wait(exchange)
            sends, receives = self._messages(step)
            after = (begin, marks[step.after]) if step.after >= 0 else (begin,)
            exchange = transport.start(sends, receives, after)
            self._merge(arrived)
            for call in step.calls:
                self.attend(call)
            marks.append(transport.now())
            arrived = step.receives
        if exchange is not None:
            transport.wait(exchange)
        self._merge(arrived)

    def attend(self, call: Call) -> None:
        raise NotImplementedError

    def merge(self, block: Block, fields: Fields) -> None:
        raise NotImplementedError

    def row_like(self, kind: Kind) -> Fields:
        """Tensors whose rows have the shapes and dtypes of `kind`'s fields."""
        raise NotImplementedError

    def rows(self, place: Place) -> Fields:
        fields = self._home[place.kind] if place.slot == HOME else self._slots[place.slot]
        return tuple(field[place.start : place.stop] for field in fields)

    def _rows_to_send(self, place: Place) -> Fields:
        if place.slot != HOME:
            return self.rows(place)
        return tuple(field[place.start : place.stop] for field in self._to_send[place.kind])

    def keys(self, call: Call) -> tuple[Tensor, Tensor]:
        """(k, v), each `[t, b, g, d]`."""
        if len(call.keys) == 1 and call.keys[0].slot == HOME and len(self._home[Kind.KV]) == 2:
            k, v = self.rows(call.keys[0])  # a rank alone keeps them apart and copies nothing
            return k, v
        pieces = [self.rows(place)[0] for place in call.keys]
        kv = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return kv[:, 0], kv[:, 1]

    def keep_for_others(self, block: Block, fields: Fields) -> None:
        self._outgoing[block].append(tuple(field.contiguous() for field in fields))

    def _slot(self, index: int, kind: Kind, tokens: int) -> Fields:
        like = self.row_like(kind)
        pool = self._engine.pool
        return tuple(
            pool.get((kind, index, i), (tokens, *field.shape[1:]), field.dtype) for i, field in enumerate(like)
        )

    def _messages(self, step: ProgramStep) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
        sends, receives = [], []
        for block, place, peer in step.sends:
            fields = self._outgoing[block].pop(0) if place is None else self._rows_to_send(place)
            sends += [(field, peer) for field in fields]
        for _, place, peer in step.receives:
            receives += [(field, peer) for field in self.rows(place)]
        return sends, receives

    def _merge(self, receives: tuple[Receive, ...]) -> None:
        for block, place, _ in receives:
            if block.kind in RESULTS and block.home == self._program.rank:
                self.merge(block, self.rows(place))


class ForwardPass(_Pass):
    """home: Q `(q,)`, KV `(kv,)` or, for a rank alone, `(k, v)`."""

    def __init__(self, program: Program, engine: Engine, home: dict[Kind, Fields], scale: float) -> None:
        super().__init__(program, engine, home, scale)
        (self._q,) = home[Kind.Q]
        self.output = MergedOutput(self._q)

    def attend(self, call: Call) -> None:
        (q,) = self.rows(call.query)
        k, v = self.keys(call)
        out, lse = self._engine.kernel.forward(q, k, v, causal=call.attend.causal, scale=self._scale)
        if call.results:
            self.keep_for_others(call.results[0], (out, lse))
        else:
            self.output.add(call.attend.query.start, out, lse)

    def merge(self, block: Block, fields: Fields) -> None:
        out, lse = fields
        self.output.add(block.start, out, lse, borrowed=True)

    def row_like(self, kind: Kind) -> Fields:
        if kind is Kind.OUT:
            lse_dtype = torch.float64 if self._q.dtype == torch.float64 else torch.float32
            return self._q, self._q.new_empty(self._q.shape[:3], dtype=lse_dtype)
        return self._home[kind]


class BackwardPass(_Pass):
    """home: Q_GRAD `(q, out, grad of out, lse)`, KV as forward."""

    def __init__(self, program: Program, engine: Engine, home: dict[Kind, Fields], scale: float) -> None:
        super().__init__(program, engine, home, scale)
        self.dq = Sum(home[Kind.Q_GRAD][0])
        self.dkv = tuple(Sum(field) for field in home[Kind.KV])

    def attend(self, call: Call) -> None:
        q, out, grad_out, lse = self.rows(call.query)
        k, v = self.keys(call)
        dq, dk, dv = self._engine.kernel.backward(
            grad_out, q, k, v, out, lse, causal=call.attend.causal, scale=self._scale
        )
        away = iter(call.results)
        offset = 0
        for key in call.attend.keys:
            part = slice(offset, offset + key.tokens)
            offset += key.tokens
            if key.home != self._program.rank:
                self.keep_for_others(next(away), (torch.stack((dk[part], dv[part]), dim=1),))
            elif len(self.dkv) == 2:
                self.dkv[0].add(key.start, dk[part])
                self.dkv[1].add(key.start, dv[part])
            else:
                self.dkv[0].add(key.start, torch.stack((dk[part], dv[part]), dim=1))
        query = call.attend.query
        if query.home == self._program.rank:
            self.dq.add(query.start, dq)
        else:
            self.keep_for_others(next(away), (dq,))

    def merge(self, block: Block, fields: Fields) -> None:
        (self.dq if block.kind is Kind.DQ else self.dkv[0]).add(block.start, fields[0], borrowed=True)

    def row_like(self, kind: Kind) -> Fields:
        if kind is Kind.DQ:
            return (self._home[Kind.Q_GRAD][0],)
        return self._home[Kind.KV if kind is Kind.DKV else kind]
