"""The interface of transports, and the one for point-to-point messages over NCCL or gloo.

On CUDA, messages run on the transport's own stream. It waits only for the events that it is given, so a transfer never
queues behind a kernel that it does not depend on, and the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..plans.plan import NUM_FIELDS
from ..plans.recording import Recording
from ..plans.send_layout import SentMessage
from .collectives import not_owned

Memory = Callable[[int], Tensor]
"""Returns send memory of the given number of bytes that does not move during a pass."""
Message = tuple[Tensor, int]
"""A contiguous tensor, and the rank of the group that receives or sends it."""


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
        """Return the send memory of this pass, as bytes."""

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Sequence[Any]) -> Exchange:
        """Start the messages of a step.

        Args:
            passed: blocks of other ranks to send on. Like `receives`, they are contiguous tensors, field by field in
                the order of the recording's messages.
            after: events that the messages wait for.
        """

    def wait(self, exchange: Exchange) -> None:
        """Make the caller's stream wait until the messages have arrived."""


class Transport:
    """Carries the messages between the ranks of a process group, which construct it together.

    Args:
        group: the ranks that send to each other.
        device: this rank's device, on which all tensors are.
    """

    name: str
    over_peers: ClassVar[bool] = False
    """Whether ranks read each other's memory; otherwise messages are sent."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that send to each other; it is not kept alive."""
        return self._group()

    @group.setter
    def group(self, group: dist.ProcessGroup) -> None:
        self._group = not_owned(group)

    def record_event(self) -> torch.cuda.Event | None:
        """Return an event after all work issued so far to the caller's stream; None on CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def channel(self, recording: Recording, num_bytes: int, memory: Memory) -> Channel:
        """Return the channel of a recording.

        Args:
            num_bytes: the send memory of the rank that sends most.
            memory: allocates send memory for point-to-point messages.
        """
        raise NotImplementedError

    def abort(self, error: BaseException) -> None:
        """Handle the failure of a pass on this rank, whose remaining messages others may wait for.

        Point-to-point messages fail by themselves when this rank ends.
        """


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

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[torch.cuda.Event | None] = ()
    ) -> Exchange:
        """Start a batch of messages. The peers' batches must contain the matching messages in the same order.

        Args:
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
        """Make the caller's stream (on CPU: the caller) wait until the messages have been sent and received.

        Raises:
            RuntimeError: a peer failed.
        """
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
    """Point-to-point messages, sent from the send memory or from the buffers in which they were received.

    Args:
        memory: returns the send memory.
    """

    generation = 0

    def __init__(self, transport: P2PTransport, recording: Recording, memory: Callable[[], Tensor]) -> None:
        self.memory = memory
        self._transport, self._layout = transport, recording.sends
        self._sources = [
            [each.peer for each in receives for _ in range(NUM_FIELDS[each.block.kind])]
            for receives in recording.receives
        ]

    def begin(self) -> int:
        return 0

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Sequence[Any]) -> Exchange:
        rest = iter(passed)
        sends: list[tuple[Tensor, int]] = []
        for message in self._layout.messages[step]:
            sends += ((_bytes(tensor), message.peer) for tensor in self._fields(message, rest))
        into = [(_bytes(tensor), peer) for tensor, peer in zip(receives, self._sources[step], strict=True)]
        return self._transport.start(sends, into, after)

    def wait(self, exchange: Exchange) -> None:
        self._transport.wait(exchange)

    def _fields(self, message: SentMessage, passed: Iterator[Tensor]) -> list[Tensor]:
        if message.passed:
            return list(islice(passed, NUM_FIELDS[message.block.kind]))
        memory = self.memory()
        spans = self._layout.regions[message.region].spans(message.start, message.block.tokens)
        return [memory[offset : offset + size] for offset, size in spans]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
