"""The protocol of peer memory, without a GPU: streams are queues whose operations a scheduler runs in any order that
the device may, flags and bytes are real. Nothing may hang, and every message has to bring what its sender meant."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_longctx.attention.mixed_post import MixedPost, crossings
from megatron_longctx.attention.post import PeerPost, outbox_of
from megatron_longctx.attention.program import HOME, Place, Program, programs
from megatron_longctx.comm import Exchange, Mailbox, PeerTransport, peer
from megatron_longctx.schedules import Block, Kind, PlanOptions, build_plan, keeping
from megatron_longctx.testing.plans import one_sided_plan, tangled_plan

ROWS = {
    Kind.Q: (2,), Kind.KV: (1,), Kind.OUT: (2, 1), Kind.Q_GRAD: (2, 2, 2, 1), Kind.GRAD: (2,), Kind.DQ: (2,),
    Kind.DKV: (1,),
}  # fmt: skip


def row_bytes(kind: Kind, parts: int) -> tuple[int, ...]:
    return tuple(64 * size for size in ROWS[kind])


class Event:
    """A place in a stream."""

    def __init__(self) -> None:
        self._reached = False

    def reach(self) -> bool:
        self._reached = True
        return True

    def is_reached(self) -> bool:
        return self._reached


class Stream:
    """Operations in order; each says whether it could be done."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], bool]] = deque()

    def do(self, work: Callable[[], Any]) -> None:
        self.queue.append(lambda: (work(), True)[1])

    def record_event(self) -> Event:
        event = Event()
        self.queue.append(event.reach)
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.is_reached)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Flags:
    """Stands for `FlagOperations`."""

    state: ClassVar[dict[int, int]] = {}

    def __init__(self, addresses: Sequence[int], taken: bool) -> None:
        self.addresses, self.taken = tuple(addresses), taken

    @classmethod
    def set(cls, addresses: Sequence[int]) -> Flags:
        return cls(addresses, False)

    @classmethod
    def take(cls, addresses: Sequence[int]) -> Flags:
        return cls(addresses, True)

    def issue(self, stream: Stream) -> None:
        def put() -> None:
            assert not any(self.state.get(address) for address in self.addresses), "a flag was set twice"
            self.state.update(dict.fromkeys(self.addresses, 1))

        def take() -> bool:
            if not all(self.state.get(address) for address in self.addresses):
                return False
            self.state.update(dict.fromkeys(self.addresses, 0))
            return True

        if self.taken:
            stream.queue.append(take)
        else:
            stream.do(put)


class Bytes:
    """A tensor of bytes that the current stream copies when it comes to it."""

    here: Stream

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    def __getitem__(self, part: slice) -> Bytes:
        return Bytes(self.memory[part])

    def view(self, *_: Any) -> Bytes:
        return self

    def copy_(self, source: Bytes) -> None:
        Bytes.here.do(lambda: self.memory.__setitem__(slice(None), bytes(source.memory)))

    def write(self, content: bytes) -> None:
        Bytes.here.do(lambda: self.memory.__setitem__(slice(None), content))


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    before, Bytes.here = Bytes.here, stream
    yield
    Bytes.here = before


class Far:
    """Point-to-point messages of a rank, on its own stream: a batch is over when all of it has met its other end."""

    channels: ClassVar[dict[tuple[int, int], deque[list[Any]]]] = {}
    moved: ClassVar[list[bool]] = [False]

    def __init__(self, rank: int) -> None:
        self.rank, self.stream = rank, Stream()

    def start(self, step: int, sends: Any, receives: Any, after: Sequence[Any]) -> Exchange:
        for event in after:
            self.stream.wait_event(event)
        mine: list[list[Any]] = []
        left = list(receives)

        def batch() -> bool:
            if not mine and sends:
                for message, to in sends:
                    mine.append([message, False])
                    self.channels.setdefault((self.rank, to), deque()).append(mine[-1])
                self.moved[0] = True
            for message, source in list(left):
                waiting = self.channels.get((source, self.rank))
                if waiting and next(other for other in left if other[1] == source)[0] is message:
                    sent = waiting.popleft()
                    message.memory[:] = bytes(sent[0].memory)
                    sent[1] = self.moved[0] = True
                    left.remove((message, source))
            return not left and all(sent for _, sent in mine)

        self.stream.queue.append(batch)
        return Exchange(arrived=self.stream.record_event() if sends or receives else None)  # type: ignore[arg-type]

    def wait(self, exchange: Exchange) -> None:
        if exchange.arrived is not None:
            Bytes.here.wait_event(exchange.arrived)  # type: ignore[arg-type]


def content(block: Block, field: int, number: int) -> bytes:
    """What the rows of a block are in pass `number`: every row another byte."""
    size = row_bytes(block.kind, block.heads.parts)[field]
    seeds = (
        (str(block.kind), block.home, row, block.origin, block.heads, field, number)
        for row in range(block.start, block.stop)
    )
    return b"".join(bytes([hash(seed) % 251]) * size for seed in seeds)


class Rank:
    def __init__(
        self, rank: int, memories: list[list[memoryview]], peers: tuple[int, ...], capacity: int, steps: int
    ) -> None:
        self.caller = Stream()
        self.transport = PeerTransport.__new__(PeerTransport)
        self.transport.rank, self.transport.world = rank, len(memories)
        self.transport.peers = peers
        self.far = Far(rank)
        self.transport.stream, self.transport.signals = Stream(), Stream()  # type: ignore[assignment]
        self.transport.device, self.transport.generation = torch.device("cpu"), 1
        self.transport._broken, self.transport._turn, self.transport._unread = None, 0, [None, None]
        self.transport._capacity, self.transport._steps = capacity, steps
        self.transport._flags = SimpleNamespace(buffer_ptrs=[10**6 * (1 + r) for r in peers])
        self.transport._halves = [
            SimpleNamespace(get_buffer=lambda place, *_, turn=turn: Bytes(memories[peers[place]][turn]))
            for turn in range(2)
        ]
        self.slots: dict[Any, memoryview] = {}
        self.met = 0  # steps whose messages were read by the caller's stream

    def streams(self) -> list[Any]:
        return [self.caller, self.transport.stream, self.transport.signals, self.far.stream]

    def slot(self, program: Program, place: Place, field: int) -> Bytes:
        """Shared by all passes of a program, as the executor's are."""
        size = row_bytes(place.kind, place.heads.parts)[field]
        key = id(program), place.slot, field
        if key not in self.slots:
            self.slots[key] = memoryview(bytearray(program.slots[place.slot].tokens * size))
        return Bytes(self.slots[key][place.start * size : place.stop * size])

    def run(self, program: Program, post: Any, number: int) -> None:
        """Issue a pass as the executor does."""
        Bytes.here = self.caller
        post.begin()
        homes: dict[Any, Bytes] = {}
        results: dict[Any, Bytes] = {}
        for send in (send for step in program.steps for send in step.sends):
            if send.place is not None and send.place.slot == HOME:
                whole = Block(send.place.kind, program.rank, 0, program.num_tokens, -1, send.place.heads)
                for field in range(len(ROWS[whole.kind])):
                    key = whole.kind, whole.heads, field
                    homes[key] = self.room(post, ("home", *key), whole, field)
                    homes[key].write(content(whole, field, number))
        begin, marks, exchange = self.caller.record_event(), [], None
        for t, step in enumerate(program.steps):
            if exchange is not None:
                post.wait(exchange)
            sends = []
            for block, place, peer_rank, result in step.sends:
                for field in range(len(ROWS[block.kind])):
                    if place is None:
                        sends.append((results.pop((result, field)), peer_rank))
                    elif place.slot != HOME:
                        sends.append((self.slot(program, place, field), peer_rank))
                    else:
                        size = row_bytes(block.kind, place.heads.parts)[field]
                        whole_rows = homes[block.kind, place.heads, field]
                        sends.append((whole_rows[place.start * size : place.stop * size], peer_rank))
            receives = [
                (self.slot(program, place, field), source)
                for block, place, source in step.receives
                for field in range(len(ROWS[block.kind]))
            ]
            mailbox = self.meeting(post, program, t)
            if mailbox is not None:
                for (into, _), source in zip(receives, mailbox.meet(t, receives), strict=True):
                    into.copy_(source)
                mailbox.read(t)
                exchange, begin = None, self.caller.record_event()
                self.met += 1
            else:
                after = (begin, marks[step.after]) if step.after >= 0 else (begin,)
                exchange = post.start(t, sends, receives, after)
            if t:
                self.check(program, t - 1, number)
            for away in (away for call in step.calls for away in call.away if away.complete):
                whole = program.outgoing[away.result]
                for field in range(len(ROWS[whole.kind])):
                    key = away.result, field
                    results[key] = self.room(post, ("result", *key), whole, field)
                    results[key].write(content(whole, field, number))
            marks.append(self.caller.record_event())
        if exchange is not None:
            post.wait(exchange)
        self.check(program, len(program.steps) - 1, number)
        if isinstance(post, PeerPost):
            self.check_join(program, post)

    def check_join(self, program: Program, post: PeerPost) -> None:
        """A capture refuses to wait for streams that have no part in it."""
        started = [t for t, step in enumerate(program.steps) if self.meeting(post, program, t) is None]
        used = any(program.steps[t].sends or program.steps[t].receives for t in started)
        before = len(self.caller.queue)
        post.join()
        assert (len(self.caller.queue) > before) == used

    @staticmethod
    def meeting(post: Any, program: Program, t: int) -> Any:
        return post.meeting(t) if program.waits_at_once[t] else None

    @staticmethod
    def room(post: Any, name: Any, block: Block, field: int) -> Bytes:
        """Where the post wants it, or memory of its own."""
        size = row_bytes(block.kind, block.heads.parts)[field]
        found: Bytes | None = post.room(name, (block.tokens, size), torch.uint8)
        return Bytes(memoryview(bytearray(block.tokens * size))) if found is None else found

    def check(self, program: Program, t: int, number: int) -> None:
        for block, place, _ in program.steps[t].receives:
            for field in range(len(ROWS[block.kind])):
                found, expected = self.slot(program, place, field), content(block, field, number)
                self.caller.do(
                    lambda found=found, expected=expected, block=block: self._same(found, expected, block, t)
                )

    def _same(self, found: Bytes, expected: bytes, block: Block, t: int) -> None:
        assert bytes(found.memory) == expected, f"rank {self.transport.rank}, step {t}: {block} is something else"


def through_one_queue(streams: list[Stream], draw: random.Random) -> Stream:
    """The operations of a rank's streams in one of the orders that their events allow: a graph may be given to the
    device so, where an operation that waits for a flag holds up all that come after it."""
    queue = Stream()
    while any(stream.queue for stream in streams):
        operations = draw.choice([stream.queue for stream in streams if stream.queue])
        for _ in range(draw.choice((1, 1000))):
            if not operations:
                break
            event = getattr(operations[0], "__self__", None)
            if isinstance(event, Event):
                if not operations[0]():
                    break
                operations.popleft()
            else:
                queue.queue.append(operations.popleft())
    return queue


def schedule(streams: list[Stream], draw: random.Random) -> None:
    """Run what can be run, in an order that favours some streams over others, until nothing is left."""
    while any(stream.queue for stream in streams):
        order = sorted(streams, key=lambda stream: draw.random())
        ran = Far.moved[0] = False
        for stream in order:
            for _ in range(draw.choice((1, 3, 1000))):
                if not stream.queue or not stream.queue[0]():
                    break
                stream.queue.popleft()
                ran = True
        assert ran or Far.moved[0], "every stream waits for another"


PLANS: dict[str, Any] = {
    **{name: build_plan(name, 6, 75) for name in ("zigzag", "tasp", "helper")},
    "usp": build_plan("usp", 6, 75, options=PlanOptions(inner_size=2)),
    "ring": build_plan("ring", 6, 72, causal=False),
    "double_ring": build_plan("double_ring", 6, 75, options=PlanOptions(inner_size=3)),
    "all_gather": build_plan("all_gather", 5, 75, True, PlanOptions(8)),
    "tangled": tangled_plan(12),
    "one-sided": one_sided_plan(8),
    "ulysses": build_plan("ulysses", 6, 75),
    "ulysses, ranks without tokens": build_plan("ulysses", 6, 4),
    "usp, ranks without tokens": build_plan("usp", 6, 4, options=PlanOptions(inner_size=2)),
    "ulysses, chunks": build_plan("ulysses", 5, 75, options=PlanOptions(head_chunks=2)),
    "ulysses, kept": keeping(build_plan("ulysses", 6, 75)),
    "usp, kept": keeping(build_plan("usp", 6, 75, options=PlanOptions(inner_size=2))),
}  # fmt: skip


def hosts(n: int, kind: str) -> list[tuple[int, ...]]:
    """By rank, the ranks that share its host."""
    if kind == "one":
        return [tuple(range(n))] * n
    if kind == "halves":
        half = n // 2
        return [tuple(range(half)) if rank < half else tuple(range(half, n)) for rank in range(n)]
    return [tuple(r for r in range(n) if r % 2 == rank % 2 and r) if rank else (0,) for rank in range(n)]


@pytest.mark.parametrize("kind", ["one", "halves", "scattered"])
@pytest.mark.parametrize("name", PLANS)
def test_nothing_hangs_and_every_message_arrives(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "FlagOperations", Flags)
    monkeypatch.setattr(peer, "_seen_as", lambda views, i, tensor: views[i])
    cuda = SimpleNamespace(stream=_on, current_stream=lambda _: Bytes.here)
    fake = SimpleNamespace(cuda=cuda, inference_mode=torch.inference_mode, uint8=torch.uint8)
    monkeypatch.setattr(peer, "torch", fake)
    plan = PLANS[name]
    peers = hosts(plan.n, kind)
    pairs = [programs(plan, rank) for rank in range(plan.n)]
    boxes = [[outbox_of(program, row_bytes, peers[rank]) for program in pair] for rank, pair in enumerate(pairs)]
    capacity = max(box.num_bytes for pair in boxes for box in pair)
    steps = max(len(program.steps) for pair in pairs for program in pair)
    if name in ("zigzag", "ring", "tasp") and kind == "one":
        assert any(box.awaits for pair in boxes for box in pair)  # memory is used again
    for seed in range(6):
        Flags.state, Far.channels = {}, {}
        memories = [[memoryview(bytearray(capacity)) for _ in range(2)] for _ in range(plan.n)]
        ranks = [Rank(r, memories, peers[r], capacity, steps) for r in range(plan.n)]
        for r, rank in enumerate(ranks):
            posts: list[Any] = []
            for way in range(2):
                every = [boxes[other][way].sends for other in range(plan.n)]
                post: Any = PeerPost(Mailbox(rank.transport, boxes[r][way], every), boxes[r][way])
                if kind != "one":
                    post = MixedPost(post, rank.far, peers[r], crossings(pairs[r][way], peers[r]))  # type: ignore[arg-type]
                posts.append(post)
            # The host waits for nothing, so that all passes can be issued at once.
            for number, way in enumerate((0, 1, 1, 0, 0, 1)):
                rank.run(pairs[r][way], posts[way], number)
        if kind == "one" and name != "all_gather":
            assert any(rank.met for rank in ranks)
        draw = random.Random(seed)
        if kind == "one" and seed % 2:  # as a graph of each pass may be
            schedule([through_one_queue(rank.streams(), draw) for rank in ranks], draw)
        else:
            schedule([stream for rank in ranks for stream in rank.streams()], draw)
