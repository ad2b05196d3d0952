"""Follows a program: starts its messages, calls its kernels, merges its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm import BufferPool, Exchange, MixedTransport, PeerTransport, Transport, WaitClock
from ..kernels import AttentionKernel
from ..schedules import ALL_HEADS, RESULTS, Block, Heads, Kind
from .accumulate import Gathering, MergedOutput, Sum
from .mixed_post import post_over
from .pack import Field, head_slice, heads_dim, packed_parts
from .post import DirectPost, Fields, Post
from .program import HOME, Away, Call, Place, Program, ProgramStep, Receive, Slot

_HOME_OF = {Kind.OUT: Kind.Q, Kind.DQ: Kind.Q_GRAD, Kind.DKV: Kind.KV} | {
    kind: kind for kind in (Kind.Q, Kind.KV, Kind.Q_GRAD, Kind.GRAD)
}
"""Whose heads a kind has: those of the rank's own tensors of this kind."""


@dataclass(frozen=True)
class Engine:
    """What programs run on.

    transport: None for a group of one rank. graph_tokens: passes over at most so many tokens of a rank are replayed
    from CUDA graphs. clock: measures the waiting for messages. posts, replays: by program and shapes, once made.
    """

    kernel: AttentionKernel
    transport: Transport | None
    pool: BufferPool
    graph_tokens: int = 0
    clock: WaitClock | None = None
    posts: dict[Hashable, tuple[Program, Post]] = field(default_factory=dict)
    replays: dict[Hashable, tuple[Program, Any]] = field(default_factory=dict)


class _Pass(ABC):
    """One run of a program. Subclasses say what a kernel call computes and where arrived results go.

    Args:
        home: this rank's own tensors; KV is `(k, v)`, which are packed into one where there are other ranks, or
            packed already.
    """

    def __init__(self, program: Program, engine: Engine, home: dict[Kind, Fields], scale: float) -> None:
        self._program = program
        self._engine = engine
        self._home = dict(home)
        self._kv = home[Kind.KV] if len(home[Kind.KV]) == 2 else ()
        self._scale = scale
        self._post: Post | None = None
        if engine.transport is not None and self._kv:
            self._home[Kind.KV] = (self.kv_like(),)  # until packed
        self._slots: list[Fields] = []
        self._to_send: dict[tuple[Kind, Heads], Fields] = {}
        self._outgoing: dict[int, Gathering] = {}
        self._joined: dict[tuple[Block, ...], Fields] = {}

    def run(self, begun: bool = False) -> None:
        """Run the program; `begun`: its post has been told to begin already."""
        transport = self._engine.transport
        if transport is None:
            for step in self._program.steps:
                for call in step.calls:
                    self.attend(call)
            return
        self._slots = [
            self._slot(name, slot) for name, slot in zip(self._program.slot_names, self._program.slots, strict=True)
        ]
        post = self.post()
        if not begun:
            post.begin()
        # Copied before the mark that the messages wait for, never between it and the sending.
        if self._kv and self.needs_packed_kv():
            self._pack_keys(post)
        self._pack(post, 0)
        packed = transport.now()
        exchange: Exchange | None = None
        arrived: tuple[Receive, ...] = ()
        marks: list[torch.cuda.Event | None] = []
        for t, step in enumerate(self._program.steps):
            if exchange is not None:
                self._wait(post, exchange)
            sends, receives = self._messages(step)
            after = (packed, marks[step.after]) if step.after >= 0 else (packed,)
            exchange = post.start(t, sends, receives, after)
            if t + 1 < len(self._program.steps) and self._pack(post, t + 1):
                packed = transport.now()
            self._copy_own(step)
            self._merge(arrived)
            self.settle()
            for call in step.calls:
                self.attend(call)
            marks.append(transport.now())
            arrived = step.receives
        self.finish_early(arrived)
        if exchange is not None:
            self._wait(post, exchange)
        self._merge(arrived)

    def _wait(self, post: Post, exchange: Exchange) -> None:
        clock = self._engine.clock
        if (
            clock is None
            or not clock.running
            or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        ):
            post.wait(exchange)
            return
        clock.start()
        post.wait(exchange)
        clock.stop()

    @abstractmethod
    def finish_early(self, arriving: tuple[Receive, ...]) -> None:
        """Do what can be done beside the last messages, which bring `arriving`."""

    def post(self) -> Post:
        """The one for this program and these shapes; made, by all ranks together, when it is first needed."""
        if self._post is None:
            assert self._engine.transport is not None
            self._post = self._find_post(self._engine.transport)
        return self._post

    def _find_post(self, transport: Transport) -> Post:
        if not isinstance(transport, PeerTransport | MixedTransport):
            return DirectPost(transport)
        shapes = tuple(field.shape[1:] for fields in self._home.values() for field in fields)
        key = (id(self._program), shapes)
        if key not in self._engine.posts:
            post = post_over(transport, self._program, self._row_bytes)
            self._engine.posts[key] = (self._program, post)  # kept together: an id is only good for what is alive
        return self._engine.posts[key][1]

    def _row_bytes(self, kind: Kind, parts: int) -> list[int]:
        return [
            field[0:1].numel() * field.element_size()
            for field in (self._of_heads(f, kind, Heads(0, parts), ALL_HEADS) for f in self.rows_like(kind, 1))
        ]

    def _pack_keys(self, post: Post) -> None:
        """Put this rank's keys and values side by side, where they are sent from if they are."""
        name = Kind.KV, ALL_HEADS
        sent = any(name in first for first in self._program.first_sends)
        room = post.room(("home", *name, 0), *_like(self._home[Kind.KV][0])) if sent else None
        self._home[Kind.KV], self._kv = (self.packed_kv(room),), ()
        if sent:
            self._to_send[name] = self._home[Kind.KV]

    def _pack(self, post: Post, step: int) -> bool:
        """Put those of this rank's own tensors that a step is the first to send where they are sent from. Returns
        whether there were any."""
        first = [name for name in self._program.first_sends[step] if name not in self._to_send]
        split: dict[tuple[Kind, int], list[Heads]] = {}
        for kind, heads in first:
            if heads != ALL_HEADS:
                split.setdefault((kind, heads.parts), []).append(heads)
                continue
            fields = []
            for i, each in enumerate(self._home[kind]):
                room = post.room(("home", kind, heads, i), *_like(each))
                fields.append(each.contiguous() if room is None else room.copy_(each))
            self._to_send[kind, heads] = tuple(fields)
        for (kind, _), parts in split.items():
            for heads, packed in packed_parts(post, kind, parts, self._own_fields(kind)).items():
                self._to_send[kind, heads] = packed
        return bool(first)

    def needs_packed_kv(self) -> bool:
        """Whether this rank's own keys and values are read as they travel. Else parts of the heads are taken straight
        from k and v."""
        return self._program.reads_packed_keys

    def _own_fields(self, kind: Kind) -> list[Field]:
        if kind is Kind.KV and self._kv:
            return [Field(self._home[kind][0], self._kv)]
        return [Field(each, (each,)) for each in self._home[kind]]

    def _copy_own(self, step: ProgramStep) -> None:
        """Put own rows among the other ranks' that are arriving."""
        for source, target in step.copies:
            for own, into in zip(self._own_fields(source.kind), self.rows(target), strict=True):
                heads = head_slice(own.like.shape[heads_dim(own.like)], source.heads)
                own.write(into, slice(source.start, source.stop), heads)

    @abstractmethod
    def settle(self) -> None:
        """Read the results that have arrived, before their memory is used again."""

    @abstractmethod
    def attend(self, call: Call) -> None:
        """Run the call's kernel; add what is this rank's own and keep what is for others."""

    @abstractmethod
    def merge(self, block: Block, fields: Fields) -> None:
        """Add a result that another rank has computed for this one."""

    @abstractmethod
    def row_like(self, kind: Kind) -> Fields:
        """Tensors whose rows have the shapes and dtypes of `kind`'s fields."""

    def rows(self, place: Place) -> Fields:
        fields = self._home[place.kind] if place.slot == HOME else self._slots[place.slot]
        return tuple(
            self._of_heads(field, place.kind, place.heads, place.held)[place.start : place.stop] for field in fields
        )

    @abstractmethod
    def gathering(self, block: Block) -> Gathering:
        """Where parts of a result for another rank come together."""

    def gathered(self, places: tuple[Place, ...]) -> Fields:
        """The rows of several places as one sequence; copied only if they are not one place."""
        if len(places) == 1:
            return self.rows(places[0])
        return tuple(torch.cat(pieces) for pieces in zip(*map(self.rows, places), strict=True))

    def queries(self, call: Call) -> Fields:
        """What the call needs of its queries; what had to be copied together is kept for the calls that follow."""
        if len(call.queries) == 1:
            return self.rows(call.queries[0])
        if call.attend.queries not in self._joined:
            self._joined[call.attend.queries] = self.gathered(call.queries)
        return self._joined[call.attend.queries]

    def keys(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """(k, v), each `[t, b, g, d]`, of keys and values as they lie there."""
        if len(fields) == 2:  # a rank alone keeps them apart and copies nothing
            return fields[0], fields[1]
        return self.unpacked_kv(fields[0])

    def kv_like(self) -> Tensor:
        """A tensor of no memory with the shape and dtype of this rank's keys and values as they travel, tokens first
        and heads before the last dimension."""
        k, _ = self._kv
        return k.new_empty(()).expand(k.shape[0], 2, *k.shape[1:])

    def packed_kv(self, room: Tensor | None) -> Tensor:
        """This rank's keys and values as they travel; in `room` where there is one."""
        return torch.stack(self._kv, dim=1, out=room)

    def unpacked_kv(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The (k, v) of some tokens and heads, for the kernel."""
        return packed[:, 0], packed[:, 1]

    def heads_of(self, kind: Kind, heads: Heads) -> slice:
        """Where part `heads` lies among all heads of a kind."""
        return head_slice(self._home[_HOME_OF[kind]][0].shape[-2], heads)

    def _of_heads(self, field: Tensor, kind: Kind, heads: Heads, held: Heads) -> Tensor:
        if heads == held:
            return field
        wanted, first = self.heads_of(kind, heads), self.heads_of(kind, held).start
        return field.narrow(heads_dim(field), wanted.start - first, wanted.stop - wanted.start)

    def _rows_to_send(self, place: Place) -> Fields:
        if place.slot != HOME:  # passed on as it came: a copy here would come after the mark that the message waits for
            return self.rows(place)
        return tuple(field[place.start : place.stop] for field in self._to_send[place.kind, place.heads])

    def keep_for_others(self, away: Away, fields: Fields) -> None:
        """Add to an outgoing result; what is complete is made ready here, before the mark that its message awaits."""
        whole = self._program.outgoing[away.result]
        if away.result not in self._outgoing:
            self._outgoing[away.result] = self.gathering(whole)
        self._outgoing[away.result].add(away.block.start - whole.start, *fields)
        if away.complete:
            assert self._post is not None
            rooms = []
            for i, like in enumerate(self._result_like(whole)):
                room = self._post.room(("result", away.result, i), *_like(like))
                if room is not None:
                    rooms.append(room)
            self._outgoing[away.result].close(tuple(rooms) or None)

    def _result_like(self, block: Block) -> Fields:
        """Tensors of no memory with the shapes of a result's fields."""
        return tuple(
            self._of_heads(field, block.kind, block.heads, ALL_HEADS)
            for field in self.rows_like(block.kind, block.tokens)
        )

    def rows_like(self, kind: Kind, tokens: int) -> Fields:
        """Tensors of no memory with the shapes of so many rows of `kind`."""
        return tuple(field.new_empty(()).expand(tokens, *field.shape[1:]) for field in self.row_like(kind))

    def _slot(self, name: int, slot: Slot) -> Fields:
        part = Heads(0, slot.parts)
        like = (self._of_heads(field, slot.kind, part, ALL_HEADS) for field in self.row_like(slot.kind))
        if slot.kept:
            return tuple(field.new_empty((slot.tokens, *field.shape[1:])) for field in like)
        pool = self._engine.pool
        return tuple(
            pool.get((slot.kind, slot.parts, name, i), (slot.tokens, *field.shape[1:]), field.dtype)
            for i, field in enumerate(like)
        )

    def _messages(self, step: ProgramStep) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
        sends, receives = [], []
        for _, place, peer, result in step.sends:
            fields = self._outgoing.pop(result).fields if place is None else self._rows_to_send(place)
            sends += [(field, peer) for field in fields]
        for _, place, peer in step.receives:
            receives += [(field, peer) for field in self.rows(place)]
        return sends, receives

    def _merge(self, receives: tuple[Receive, ...]) -> None:
        for block, place, _ in receives:
            if block.kind in RESULTS and block.home == self._program.rank:
                self.merge(block, self.rows(place))


class ForwardPass(_Pass):
    """home: Q `(q,)`, KV `(k, v)`. After `run`, `kept` is what the program keeps for backward."""

    def __init__(self, program: Program, engine: Engine, home: dict[Kind, Fields], scale: float) -> None:
        super().__init__(program, engine, home, scale)
        (self._q,) = home[Kind.Q]
        self.output = MergedOutput(self._q)
        self.kept: list[Tensor] = []

    def attend(self, call: Call) -> None:
        (q,) = self.queries(call)
        fields = self.gathered(call.keys)
        k, v = self.keys(fields)
        out, lse = self._engine.kernel.forward(q, k, v, causal=call.attend.causal, scale=self._scale)
        self.kept += [q, out, lse] if call.keeps_queries else []
        self.kept += fields if call.keeps_keys else []
        away = iter(call.away)
        offset = 0
        for query in call.attend.queries:
            part = slice(offset, offset + query.tokens)
            offset += query.tokens
            if query.home == self._program.rank:
                self.output.add(query.start, out[part], lse[part], self.heads_of(Kind.Q, query.heads))
            else:
                self.keep_for_others(next(away), (out[part], lse[part]))

    def merge(self, block: Block, fields: Fields) -> None:
        out, lse = fields
        self.output.add(block.start, out, lse, self.heads_of(Kind.OUT, block.heads), borrowed=True)

    def settle(self) -> None:
        self.output.settle()

    def finish_early(self, arriving: tuple[Receive, ...]) -> None:
        pass

    def gathering(self, block: Block) -> Gathering:
        return Gathering(MergedOutput(self._result_like(block)[0]))

    def row_like(self, kind: Kind) -> Fields:
        if kind is Kind.OUT:
            lse_dtype = torch.float64 if self._q.dtype == torch.float64 else torch.float32
            return self._q, self._q.new_empty((), dtype=lse_dtype).expand(self._q.shape[:3])
        return self._home[kind]


class BackwardPass(_Pass):
    """home: Q_GRAD `(q, out, grad of out, lse)`, GRAD of it the third, KV as forward. kept: as forward has left it.

    What `program.reads_home` does not name may be tensors of no memory.
    """

    def __init__(
        self, program: Program, engine: Engine, home: dict[Kind, Fields], scale: float, kept: Sequence[Tensor] = ()
    ) -> None:
        super().__init__(program, engine, {**home, Kind.GRAD: (home[Kind.Q_GRAD][2],)}, scale)
        self._kept = kept
        self.dq = Sum(home[Kind.Q_GRAD][0])
        self.dk, self.dv = (Sum(field) for field in home[Kind.KV])
        self._dq_done: Tensor | None = None

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), after `run`."""
        return self.dq.finish() if self._dq_done is None else self._dq_done, self.dk.finish(), self.dv.finish()

    def finish_early(self, arriving: tuple[Receive, ...]) -> None:
        if not any(receive.block.kind is Kind.DQ for receive in arriving):
            self._dq_done = self.dq.finish()

    def attend(self, call: Call) -> None:
        q, out, grad_out, lse = self._queries_and_results(call)
        keys = self._kept[call.kept + call.num_kept - 1 :][:1] if call.keeps_keys else self.gathered(call.keys)
        k, v = self.keys(tuple(keys))
        dq, dk, dv = self._engine.kernel.backward(
            grad_out, q, k, v, out, lse, causal=call.attend.causal, scale=self._scale
        )
        # In the order of `results_away`: keys first.
        keys_away = sum(key.home != self._program.rank for key in call.attend.keys)
        self._add_keys(call, dk, dv, call.away[:keys_away])
        away = iter(call.away[keys_away:])
        offset = 0
        for query in call.attend.queries:
            part = dq[offset : offset + query.tokens]
            offset += query.tokens
            if query.home == self._program.rank:
                self.dq.add(query.start, part, self.heads_of(Kind.DQ, query.heads))
            else:
                self.keep_for_others(next(away), (part,))

    def _queries_and_results(self, call: Call) -> Fields:
        if not call.keeps_queries:
            return self.queries(call)
        q, out, lse = self._kept[call.kept : call.kept + 3]
        (grad_out,) = self.gathered(call.queries)
        return q, out, grad_out, lse

    def _add_keys(self, call: Call, dk: Tensor, dv: Tensor, away: tuple[Away, ...]) -> None:
        if len(away) == len(call.attend.keys) and all(each.whole for each in away) and self._send_all(dk, dv, away):
            return
        left = iter(away)
        offset = 0
        for key in call.attend.keys:
            part = slice(offset, offset + key.tokens)
            offset += key.tokens
            if key.home != self._program.rank:
                self.keep_for_others(next(left), (dk[part], dv[part]))
                continue
            heads = self.heads_of(Kind.DKV, key.heads)
            self.dk.add(key.start, dk[part], heads)
            self.dv.add(key.start, dv[part], heads)

    def _send_all(self, dk: Tensor, dv: Tensor, away: tuple[Away, ...]) -> bool:
        """Pack a call's gradients, which are all that their homes get from it, in one go. False where rooms do not
        lie side by side."""
        assert self._post is not None
        names = [("result", each.result, 0) for each in away]
        if not self._post.joined(names):
            return False
        tokens, *row = dk.shape
        room = self._post.room(names[0], (tokens, 2, *row), dk.dtype)
        packed = torch.stack((dk, dv), dim=1, out=room)
        offset = 0
        for each in away:
            part = packed[offset : offset + each.block.tokens]
            offset += each.block.tokens
            self._outgoing[each.result] = Gathering.of((part,))
        return True

    def merge(self, block: Block, fields: Fields) -> None:
        heads = self.heads_of(block.kind, block.heads)
        if block.kind is Kind.DQ:
            self.dq.add(block.start, fields[0], heads, borrowed=True)
            return
        self.dk.add(block.start, fields[0][:, 0], heads, borrowed=True)
        self.dv.add(block.start, fields[0][:, 1], heads, borrowed=True)

    def settle(self) -> None:
        for total in (self.dq, self.dk, self.dv):
            total.settle()

    def gathering(self, block: Block) -> Gathering:
        like = self._result_like(block)[0]
        return Gathering(Sum(like)) if block.kind is Kind.DQ else Gathering(Sum(like[:, 0]), Sum(like[:, 1]))

    def row_like(self, kind: Kind) -> Fields:
        if kind is Kind.DQ:
            return (self._home[Kind.Q_GRAD][0],)
        return self._home[Kind.KV if kind is Kind.DKV else kind]


def _like(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
