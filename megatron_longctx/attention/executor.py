"""Follows a program: starts its messages, calls its kernels, merges its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm import Exchange, Mailbox, MixedTransport, PeerTransport, measured_wait
from ..kernels.moves import Pair
from ..schedules import ALL_HEADS, RESULTS, Block, Heads, Kind
from .accumulate import MergedOutput, Sum
from .engine import Engine, Messages, PassKind
from .mixed_post import post_over
from .outgoing import Outgoing, Part, Routes
from .pack import Field, Packer
from .post import DirectPost, Fields, Post
from .program import HOME, Away, Call, Place, Program, ProgramStep, Receive
from .shapes import Like, Shapes, like
from .slots import Slots, part, rows


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
        self._scale = scale
        self._kv = home[Kind.KV] if len(home[Kind.KV]) == 2 and engine.transport is not None else ()
        if self._kv:
            del self._home[Kind.KV]  # until packed
        self._kind = self._find_kind(home)
        self._shapes = self._kind.shapes
        self._move = self._kind.mover.move
        self._slots: Slots | None = None
        self._to_send: dict[tuple[Kind, Heads], Fields] = {}
        self._outgoing: Outgoing | None = None
        self._joined: dict[tuple[Block, ...], Fields] = {}

    def _find_kind(self, home: dict[Kind, Fields]) -> PassKind:
        kinds = self._engine.kinds.setdefault(self._program, {})
        key = (type(self), *((field.shape, field.dtype) for fields in home.values() for field in fields))
        if key not in kinds:
            own = {kind: tuple(like(field) for field in fields) for kind, fields in home.items()}
            if self._kv:
                own[Kind.KV] = (self.packed_like(),)
            kinds[key] = PassKind(Shapes(own | self.results(own)))
        return kinds[key]

    def run(self, begun: bool = False) -> None:
        """Run the program; `begun`: its post has been told to begin already."""
        transport = self._engine.transport
        if transport is None:
            for step in self._program.steps:
                for call in step.calls:
                    self.attend(call)
            return
        slots = self._slots = Slots(self._program, self._shapes, self._engine.pool)
        post, packer, routes = self._messages()
        self._outgoing = Outgoing(self._program.outgoing, routes, self._kind.mover)
        if not begun:
            post.begin()
        # Copied before the mark that the messages wait for, never between it and the sending.
        if self._kv and self.needs_packed_kv():
            self._pack_keys(post)
        self._move(("pack", 0), packer.pack(0, self._own_fields, self._to_send))
        packed = transport.now()
        exchange: Exchange | None = None
        arrived: tuple[Receive, ...] = ()
        marks: list[torch.cuda.Event | None] = []
        last = len(self._program.steps) - 1
        for t, step in enumerate(self._program.steps):
            if exchange is not None:
                self._wait(post, exchange)
            mailbox = post.meeting(t) if self._program.waits_at_once[t] else None
            if mailbox is None:
                after = (packed, marks[step.after]) if step.after >= 0 else (packed,)
                exchange = post.start(t, self._sends(step), slots.receives(t), after)
            if t < last:
                pairs = packer.pack(t + 1, self._own_fields, self._to_send)
                if pairs:
                    self._move(("pack", t + 1), pairs)
                    packed = transport.now()
            self._merge(arrived)
            self.settle(self._program.results_last[t])
            arrived = step.receives
            if mailbox is not None:
                exchange = None
                if t == last and self._program.ends_with_results:
                    self._finish_there(mailbox, t, step)
                    return
                self._pull(mailbox, t, step)
                packed = transport.now()  # what has come may be passed on
            else:
                self._move(("own", t), self._own_copies(step))
            for call in step.calls:
                self.attend(call)
            marks.append(transport.now())
        self.finish_early(arrived)
        if exchange is not None:
            self._wait(post, exchange)
        self._merge(arrived)

    def _pull(self, mailbox: Mailbox, t: int, step: ProgramStep) -> None:
        """Receive a step's messages where nothing is computed meanwhile: all at once, and own rows with them."""
        assert self._slots is not None
        receives = self._slots.receives(t)
        with measured_wait(self._engine.clock):
            sources = mailbox.meet(t, receives)
            into = (tensor for tensor, _ in receives)
            self._move(("pull", t), [*zip(into, sources, strict=True), *self._own_copies(step)])
        mailbox.read(t)

    def _finish_there(self, mailbox: Mailbox, t: int, step: ProgramStep) -> None:
        """Finish the results with what the last messages bring, read where the senders have it."""
        assert self._slots is not None
        with measured_wait(self._engine.clock):
            fields = iter(mailbox.meet(t, self._slots.receives(t)))
            for block, place, _ in step.receives:
                self.merge(block, tuple(next(fields) for _ in self.rows(place)))
            self.finish()
        mailbox.read(t)

    def _wait(self, post: Post, exchange: Exchange) -> None:
        with measured_wait(self._engine.clock):
            post.wait(exchange)

    @abstractmethod
    def finish(self) -> None:
        """Bring the results together; those that ask for them afterwards get these."""

    @abstractmethod
    def finish_early(self, arriving: tuple[Receive, ...]) -> None:
        """Do what can be done beside the last messages, which bring `arriving`."""

    def post(self) -> Post:
        """The one for this program and these shapes; made, by all ranks together, when it is first needed."""
        return self._messages().post

    def _messages(self) -> Messages:
        kind, transport, program = self._kind, self._engine.transport, self._program
        if kind.messages is None:
            assert transport is not None
            post: Post
            if isinstance(transport, PeerTransport | MixedTransport):
                post = post_over(transport, program, kind.shapes.row_bytes)
            else:
                post = DirectPost(transport)
            packer = Packer(program, kind.shapes, post)
            kind.messages = Messages(post, packer, Routes(program.outgoing, kind.shapes, post))
        return kind.messages

    def _pack_keys(self, post: Post) -> None:
        """Put this rank's keys and values side by side, where they are sent from if they are."""
        name = Kind.KV, ALL_HEADS
        sent = any(name in first for first in self._program.first_sends)
        (like,) = self._shapes.own(Kind.KV)
        room = post.room(("home", *name, 0), like.shape, like.dtype) if sent else None
        self._home[Kind.KV], self._kv = (self.packed_kv(room),), ()
        if sent:
            self._to_send[name] = self._home[Kind.KV]

    def needs_packed_kv(self) -> bool:
        """Whether this rank's own keys and values are read as they travel. Else parts of the heads are taken straight
        from k and v."""
        return self._program.reads_packed_keys

    def _own_fields(self, kind: Kind) -> list[Field]:
        if kind is Kind.KV and self._kv:
            return [Field(self._kv)]
        return [Field((each,)) for each in self._home[kind]]

    def _own_copies(self, step: ProgramStep) -> list[Pair]:
        """The copies that put own rows among the other ranks' that are arriving."""
        pairs: list[Pair] = []
        for source, target in step.copies:
            heads = self._shapes.heads(source.kind, source.heads)
            for own, into in zip(self._own_fields(source.kind), self.rows(target), strict=True):
                pairs += own.write(into, source.start, source.stop, heads)
        return pairs

    @abstractmethod
    def settle(self, lasting: bool = False) -> None:
        """Read the results that have arrived, before their memory is used again. lasting: it will not be."""

    @abstractmethod
    def attend(self, call: Call) -> None:
        """Run the call's kernel; add what is this rank's own and keep what is for others."""

    @abstractmethod
    def merge(self, block: Block, fields: Fields) -> None:
        """Add a result that another rank has computed for this one."""

    @abstractmethod
    def results(self, own: dict[Kind, tuple[Like, ...]]) -> dict[Kind, tuple[Like, ...]]:
        """What the results look like that a rank gets for its `own` tensors."""

    def rows(self, place: Place) -> Fields:
        if place.slot == HOME:
            return tuple(part(field, place, self._shapes) for field in self._home[place.kind])
        assert self._slots is not None
        return self._slots.rows(place)

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

    def packed_like(self) -> Like:
        """What this rank's keys and values look like as they travel: tokens first, heads before the last dimension."""
        k, _ = self._kv
        return Like((k.shape[0], 2, *k.shape[1:]), k.dtype, k.device)

    def packed_kv(self, room: Tensor | None) -> Tensor:
        """This rank's keys and values as they travel; in `room` where there is one."""
        return torch.stack(self._kv, dim=1, out=room)

    def unpacked_kv(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The (k, v) of some tokens and heads, for the kernel."""
        k, v = packed.unbind(1)
        return k, v

    def _rows_to_send(self, place: Place) -> Fields:
        if place.slot != HOME:  # passed on as it came: a copy here would come after the mark that the message waits for
            return self.rows(place)
        first = self._program.published(place.kind).start
        packed = self._to_send[place.kind, place.heads]
        return tuple(rows(field, place.start - first, place.stop - first) for field in packed)

    def hand_out(self, blocks: Sequence[Block], away: Sequence[Away], fields: Fields, own: Callable[..., None]) -> None:
        """Give what a call has computed for `blocks` to `own` (block, rows of the fields), or keep it for others."""
        left, others, start = iter(away), [], 0
        for block in blocks:
            stop = start + block.tokens
            if block.home == self._program.rank:
                own(block, *(rows(field, start, stop) for field in fields))
            else:
                others.append(Part(start, stop, next(left)))
            start = stop
        if others:
            assert self._outgoing is not None
            self._outgoing.add(others, fields)

    def _sends(self, step: ProgramStep) -> list[tuple[Tensor, int]]:
        assert self._outgoing is not None
        sends = []
        for _, place, peer, result in step.sends:
            fields = self._outgoing.take(result) if place is None else self._rows_to_send(place)
            sends += [(field, peer) for field in fields]
        return sends

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
        self.hand_out(call.attend.queries, call.away, (out, lse), self._add)

    def _add(self, query: Block, out: Tensor, lse: Tensor) -> None:
        self.output.add(query.start, out, lse, self._shapes.heads(Kind.Q, query.heads))

    def merge(self, block: Block, fields: Fields) -> None:
        out, lse = fields
        self.output.add(block.start, out, lse, self._shapes.heads(Kind.OUT, block.heads), borrowed=True)

    def settle(self, lasting: bool = False) -> None:
        self.output.settle(lasting)

    def finish(self) -> None:
        self._move("results", self.output.place())
        self.output.finish()

    def finish_early(self, arriving: tuple[Receive, ...]) -> None:
        pass

    def results(self, own: dict[Kind, tuple[Like, ...]]) -> dict[Kind, tuple[Like, ...]]:
        (q,) = own[Kind.Q]
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return {Kind.OUT: (q, Like(q.shape[:3], lse_dtype, q.device))}


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

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), after `run`."""
        return self.dq.finish(), self.dk.finish(), self.dv.finish()

    def finish(self) -> None:
        totals = self.dq, self.dk, self.dv
        self._move("results", [pair for total in totals for pair in total.place()])
        for total in totals:
            total.finish()

    def finish_early(self, arriving: tuple[Receive, ...]) -> None:
        if not any(receive.block.kind is Kind.DQ for receive in arriving):
            self.dq.finish()

    def attend(self, call: Call) -> None:
        q, out, grad_out, lse = self._queries_and_results(call)
        keys = self._kept[call.kept + call.num_kept - 1 :][:1] if call.keeps_keys else self.gathered(call.keys)
        k, v = self.keys(tuple(keys))
        dq, dk, dv = self._engine.kernel.backward(
            grad_out, q, k, v, out, lse, causal=call.attend.causal, scale=self._scale
        )
        # In the order of `results_away`: keys first.
        keys_away = sum(key.home != self._program.rank for key in call.attend.keys)
        self.hand_out(call.attend.keys, call.away[:keys_away], (dk, dv), self._add_keys)
        self.hand_out(call.attend.queries, call.away[keys_away:], (dq,), self._add_queries)

    def _add_keys(self, key: Block, dk: Tensor, dv: Tensor) -> None:
        heads = self._shapes.heads(Kind.DKV, key.heads)
        self.dk.add(key.start, dk, heads)
        self.dv.add(key.start, dv, heads)

    def _add_queries(self, query: Block, dq: Tensor) -> None:
        self.dq.add(query.start, dq, self._shapes.heads(Kind.DQ, query.heads))

    def _queries_and_results(self, call: Call) -> Fields:
        if not call.keeps_queries:
            return self.queries(call)
        q, out, lse = self._kept[call.kept : call.kept + 3]
        (grad_out,) = self.gathered(call.queries)
        return q, out, grad_out, lse

    def merge(self, block: Block, fields: Fields) -> None:
        heads = self._shapes.heads(block.kind, block.heads)
        if block.kind is Kind.DQ:
            self.dq.add(block.start, fields[0], heads, borrowed=True)
            return
        dk, dv = fields[0].unbind(1)
        self.dk.add(block.start, dk, heads, borrowed=True)
        self.dv.add(block.start, dv, heads, borrowed=True)

    def settle(self, lasting: bool = False) -> None:
        for total in (self.dq, self.dk, self.dv):
            total.settle(lasting)

    def results(self, own: dict[Kind, tuple[Like, ...]]) -> dict[Kind, tuple[Like, ...]]:
        return {Kind.DQ: own[Kind.Q_GRAD][:1], Kind.DKV: own[Kind.KV]}
