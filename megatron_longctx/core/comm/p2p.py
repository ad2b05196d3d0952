"""The interface of transports, and the one for point-to-point messages over NCCL or gloo.

On CUDA, messages run on the transport's own stream. It waits only for the events that it is given, so a transfer never
queues behind a kernel that it does not depend on, and the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..plans.plan import NUM_FIELDS, Block
from ..plans.recording import Recording
from ..plans.send_layout import SentMessage
from .collectives import PeerMemoryError, not_owned

Memory = Callable[[int], Tensor]
"""Returns send memory of the given number of bytes that does not move during a pass."""
Message = tuple[Tensor, int]
"""A contiguous tensor, and the rank of the group that receives or sends it."""
Sizes = Callable[[Block], list[int]]
"""Returns the bytes of a block's fields in a message."""

_PATIENCE_S = 30.0
"""How long a rank that ran out of memory waits to hear the same of the others."""
NAN_BYTE = 255
"""Memory filled with it is NaN in every floating-point type."""


@dataclass
class Exchange:
    """Messages in flight. Their tensors must not be touched before `wait`."""

    works: list[dist.Work] = field(default_factory=list)
    arrived: torch.cuda.Event | None = None
    tensors: tuple[Tensor, ...] = ()


class Channel(Protocol):
    """The messages of one recording. A `SymmetricExchange` can also `acquire` and `release` them."""

    @property
    def generation(self) -> int:
        """A count that increases whenever the send memory moves."""

    def begin(self) -> int:
        """Start a pass on the caller's stream, and return the parity of its send memory."""

    def memory(self) -> Tensor:
        """Return the send memory of this pass, as bytes, to be filled on the caller's stream before a step sends it."""

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Sequence[Any]) -> Exchange:
        """Start the messages of a step.

        passed: blocks of other ranks to send on. Like `receives`, they are contiguous tensors, field by field in the
            order of the recording's messages.
        after: events that the messages wait for.
        """

    def wait(self, exchange: Exchange) -> None:
        """Make the caller's stream wait until the messages have arrived."""

    def finish(self, sizes: Sizes) -> None:
        """Exchange the rest of the messages of a pass that failed here, with NaN in place of their content. A
        RuntimeError if it failed while it began or while messages started."""


class Transport:
    """Carries the messages between the ranks of a process group, which construct it together, each on its device."""

    name: str
    over_peers: ClassVar[bool] = False
    """Whether ranks read each other's memory; otherwise messages are sent."""
    _error: ClassVar[type[RuntimeError]] = RuntimeError
    _broken: str | None = None  # why a pass failed on this rank
    _finished = False  # whether the messages of that pass were exchanged nevertheless
    _passes = 0  # the number of passes so far, the same on all ranks

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = not_owned(group), device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._number = group.get_group_store().add(f"attention/{self.rank}", 1)  # the same on all ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that send to each other; it is not kept alive."""
        return self._group()

    def record_event(self) -> torch.cuda.Event | None:
        """Return an event after all work issued so far to the caller's stream; None on CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def channel(self, recording: Recording, num_bytes: int, memory: Memory) -> Channel:
        """Return the channel of a recording.

        num_bytes: the send memory of the rank that sends most.
        memory: allocates send memory for point-to-point messages.
        """
        raise NotImplementedError

    def abort(self, error: BaseException, channel: Channel, sizes: Sizes) -> None:
        """Handle the failure of a pass on this rank, whose remaining messages others may wait for.

        Later passes are refused. But if this rank is out of memory, its messages are exchanged without their content,
        so that the others also get to the end of the pass; if all of them ran out of memory in it, passes go on.
        """
        if isinstance(error, PeerMemoryError):
            return  # memory was refused, so no pass has begun on any rank
        self._broken = self._broken or f"{type(error).__name__}: {error}".split("\n", 1)[0]
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            try:
                channel.finish(sizes)
                self.group.get_group_store().set(self._report(self.rank), "")
                self._finished = True
            except Exception as another:
                self._broken += f"; its messages could not be exchanged: {another}"

    def recover(self) -> None:
        """After a pass that failed here, let passes go on if all ranks ran out of memory in it."""
        if self._finished:
            self._finished = False
            try:
                self.group.get_group_store().wait(list(map(self._report, range(self.world))), timedelta(0, _PATIENCE_S))
                self._broken = None
            except dist.DistError:
                self._broken = f"{self._broken}, not on all ranks"

    def refuse_if(self, broken: str | None) -> None:
        """Refuse a pass after one that was broken off."""
        if broken is not None:
            raise self._error(
                f"attention was broken off before ({broken}): ranks would wait for messages that never come, or take "
                "old ones for new. Start the job again, training from its checkpoint."
            )

    def _report(self, rank: int) -> str:
        return f"attention/{self._number}/{self._passes}/{rank}"


class P2PTransport(Transport):
    """Point-to-point messages. CUDA requires a group with NCCL, CPU one with gloo."""

    name = "p2p"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._peers = dist.get_process_group_ranks(group)
        self._cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if self.world > 1:
                # NCCL connects the group's ranks in its first call, which must involve all of them. In the first step
                # of a plan, some ranks may have nothing to send, and the others would wait for them forever.
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def channel(self, recording: Recording, num_bytes: int, memory: Memory) -> DirectChannel:
        return DirectChannel(self, recording, lambda: memory(recording.sends.num_bytes))

    def begin(self) -> None:
        """Begin a pass; refused after one that failed, see `abort`."""
        self.recover()
        self.refuse_if(self._broken)
        self._passes += 1

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[torch.cuda.Event | None] = ()
    ) -> Exchange:
        """Start a batch of messages. The peers' batches must contain the matching messages in the same order.

        sends, receives: contiguous tensors on this transport's device.
        after: events that the messages wait for: data is computed, buffers are free again.
        """
        exchange = Exchange(tensors=tuple(tensor for tensor, _ in (*sends, *receives)))
        if not exchange.tensors:
            return exchange
        # Receives first: gloo announces them to the sender on the connection that a large send of ours would block.
        operations = [*self._operations(dist.irecv, receives), *self._operations(dist.isend, sends)]
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for event in after:
                if event is not None and self._stream:
                    self._stream.wait_event(event)
            exchange.works = dist.batch_isend_irecv(operations)
            if self._stream:
                for work in exchange.works:
                    work.wait()  # makes this stream wait for NCCL's, not the host
                exchange.arrived = self._stream.record_event()
        return exchange

    def wait(self, exchange: Exchange) -> None:
        """Make the caller's stream (on CPU: the caller) wait until the messages have been sent and received."""
        if exchange.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(exchange.arrived)
        elif not self._cuda:
            for work in exchange.works:
                work.wait()

    def _operations(self, direction: Callable[..., Any], messages: Sequence[Message]) -> Iterator[dist.P2POp]:
        """Number the messages of each pair of ranks in their tags, so that gloo matches them in order."""
        count: dict[int, int] = {}
        for tensor, peer in messages:
            tag = count[peer] = count.get(peer, -1) + 1
            yield dist.P2POp(direction, tensor, self._peers[peer], self.group, tag)


class DirectChannel:
    """Point-to-point messages, sent from the memory that `memory` returns or from the buffers in which they were
    received."""

    generation = 0

    def __init__(self, transport: P2PTransport, recording: Recording, memory: Callable[[], Tensor]) -> None:
        self.memory = memory
        self._transport, self._layout, self._receives = transport, recording.sends, recording.receives
        self._next: int | None = None  # the first step whose messages have not started
        self._exchange: Exchange | None = None  # in flight
        self._sources = [
            [each.peer for each in receives for _ in range(NUM_FIELDS[each.block.kind])]
            for receives in recording.receives
        ]

    def begin(self) -> int:
        self._next = None
        self._transport.begin()
        self._next = 0
        return 0

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Sequence[Any]) -> Exchange:
        rest, self._next = iter(passed), None
        sends: list[tuple[Tensor, int]] = []
        for message in self._layout.messages[step]:
            sends += ((_bytes(tensor), message.peer) for tensor in self._fields(message, rest))
        into = [(_bytes(tensor), peer) for tensor, peer in zip(receives, self._sources[step], strict=True)]
        self._exchange = self._transport.start(sends, into, after)
        self._next = step + 1
        return self._exchange

    def wait(self, exchange: Exchange) -> None:
        self._exchange = None
        self._transport.wait(exchange)

    def finish(self, sizes: Sizes) -> None:
        if self._next is None:
            raise RuntimeError("it failed while messages started")
        if self._exchange is not None:
            self.wait(self._exchange)
        steps = range(self._next, len(self._receives))
        both = [
            [[(n, each.peer) for each in some[step] for n in sizes(each.block)] for step in steps]
            for some in (self._layout.messages, self._receives)
        ]
        most = max((n for some in both for step in some for n, _ in step), default=0)
        memory = torch.full((2 * most,), NAN_BYTE, dtype=torch.uint8, device=self._transport.device)
        for sent, received in zip(*both, strict=True):
            sends = [(memory[:n], peer) for n, peer in sent]
            receives = [(memory[most : most + n], peer) for n, peer in received]
            self._transport.wait(self._transport.start(sends, receives, (self._transport.record_event(),)))

    def _fields(self, message: SentMessage, passed: Iterator[Tensor]) -> list[Tensor]:
        if message.passed:
            return list(islice(passed, NUM_FIELDS[message.block.kind]))
        memory = self.memory()
        spans = self._layout.regions[message.region].spans(message.start, message.block.tokens)
        return [memory[offset : offset + size] for offset, size in spans]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
