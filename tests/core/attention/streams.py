"""A simulated device: streams are queues whose operations a scheduler runs in any order that a GPU may choose.

Flags are words, and tensors are bytes that a stream copies when it reaches the operation.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch

from megatron_longctx.core.comm import Exchange, P2PTransport
from megatron_longctx.core.comm.p2p import NAN_BYTE


class Event:
    """A position in a stream."""

    def __init__(self) -> None:
        self._reached = False

    def reach(self) -> bool:
        self._reached = True
        return True

    def is_reached(self) -> bool:
        return self._reached


class Stream:
    """A queue of operations, each of which returns whether it could run.

    queue: shared by the streams of a device with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1). An operation that
    waits for a flag then blocks all that are issued after it.
    """

    def __init__(self, queue: deque[Callable[[], bool]] | None = None) -> None:
        self.queue: deque[Callable[[], bool]] = deque() if queue is None else queue

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
    """A stand-in for `FlagOperations`."""

    state: ClassVar[dict[int, int]] = {}

    def __init__(self, addresses: Sequence[int], taken: bool) -> None:
        self.parts: tuple[tuple[Sequence[int], bool], ...] = ((tuple(addresses), taken),)

    @classmethod
    def set(cls, addresses: Sequence[int]) -> Flags:
        return cls(addresses, False)

    @classmethod
    def wait_and_clear(cls, addresses: Sequence[int]) -> Flags:
        return cls(addresses, True)

    def then(self, others: Flags) -> Flags:
        both = Flags((), False)
        both.parts = (*self.parts, *others.parts)
        return both

    def issue(self, stream: Stream) -> None:
        def run(addresses: Sequence[int], taken: bool) -> bool:
            found = [self.state.get(address, 0) for address in addresses]
            assert taken or not any(found), "a flag was set twice"
            if not taken or all(found):
                self.state.update(dict.fromkeys(addresses, 0 if taken else 1))
            return not taken or all(found)

        stream.queue.extend(partial(run, *part) for part in self.parts)


class Bytes:
    """A tensor of bytes that the current stream copies when it reaches the operation."""

    here: ClassVar[Stream]
    nan: ClassVar[int] = 0
    """The number of checks that found NaN."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    def __getitem__(self, part: slice) -> Bytes:
        return Bytes(self.memory[part])

    def view(self, *_: Any) -> Bytes:
        return self

    def copy_(self, source: Bytes) -> None:
        Bytes.here.do(lambda: self.memory.__setitem__(slice(None), bytes(source.memory)))

    def fill_(self, value: int) -> None:
        self.write(bytes([value]) * len(self.memory))

    def write(self, content: bytes) -> None:
        Bytes.here.do(lambda: self.memory.__setitem__(slice(None), content))

    def check(self, content: bytes, name: str, or_nan: bool) -> None:
        def check() -> None:
            found = bytes(self.memory)
            if found != content:
                valid = or_nan and all(a in (b, NAN_BYTE) for a, b in zip(found, content, strict=True))
                assert valid, f"{name} has other content"
                Bytes.nan += 1

        Bytes.here.do(check)


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    before, Bytes.here = Bytes.here, stream
    yield
    Bytes.here = before


class Far(P2PTransport):
    """A rank's point-to-point messages on a separate stream: a batch ends when all its messages are matched."""

    channels: ClassVar[dict[tuple[int, int], deque[list[Any]]]] = {}
    moved: ClassVar[list[bool]] = [False]

    def __init__(self, rank: int, stream: Stream) -> None:
        self.rank, self.stream, self.device = rank, stream, torch.device("cpu")

    def record_event(self) -> Any:
        return Bytes.here.record_event()

    def start(self, sends: Any, receives: Any, after: Sequence[Any]) -> Exchange:
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


def run_all(streams: list[Stream], draw: random.Random) -> None:
    """Run all operations, in a random order that favours some streams over others."""
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
