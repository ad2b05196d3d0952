"""Batched point-to-point messages over NCCL or gloo, beside the computation.

On CUDA the messages run on a stream of the transport's own: it waits for exactly the events it is told to wait for, so
that a transfer never queues behind a kernel it does not depend on, and the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..schedules.plan import NUM_FIELDS
from ..schedules.program import Message as SentMessage
from ..schedules.program import Program

Message = tuple[Tensor, int]
"""A contiguous tensor, and the rank of the group it goes to or comes from."""


@dataclass
class Exchange:
    """Messages under way. Their tensors may not be touched before `P2PTransport.wait` has been given this."""

    works: list[dist.Work] = field(default_factory=list)
    arrived: torch.cuda.Event | None = None
    tensors: tuple[Tensor, ...] = ()
    done: bool = False


class P2PTransport:
    """Point-to-point messages between the ranks of one process group.

    Args:
        group: the process group; all its ranks construct the transport together.
        device: where the tensors live. CUDA needs a group with NCCL, CPU one with gloo.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.device = device
        self._peers = dist.get_process_group_ranks(group)
        self._cuda = device.type == "cuda"
        self._pending: set[int] = set()
        self._stream: torch.cuda.Stream | None = None
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if self.world > 1:
                # NCCL joins the group's ranks on its first call. In a plan some ranks may have nothing to send in the
                # first step, and the others would wait for them for ever: so let all meet here.
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def now(self) -> torch.cuda.Event | None:
        """A mark after all work issued so far by the caller's stream; None where there are no streams."""
        return torch.cuda.current_stream(self.device).record_event() if self._cuda else None

    hosts = None
    """Nobody reads another rank's memory."""

    def channel(self, program: Program, num_bytes: int, memory: Callable[[int], Tensor]) -> DirectChannel:
        """The messages of a program; see `channel.Transport`."""
        return DirectChannel(self, program, lambda: memory(program.sends.num_bytes))

    def break_off(self, error: BaseException) -> None:
        """A pass has ended with `error` on this rank: messages that others wait for fail when it ends."""

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[torch.cuda.Event | None] = ()
    ) -> Exchange:
        """Start one batch. The peers' batches must name the matching messages in the same order.

        Args:
            sends, receives: (tensor, peer) pairs; peers are ranks of the group.
            after: marks that the messages have to wait for (data computed, buffers free again).

        Raises:
            ValueError: a tensor that is not contiguous or lives elsewhere, or a peer outside the group.
        """
        for tensor, peer in (*sends, *receives):
            self._check(tensor, peer)
        exchange = Exchange(tensors=tuple(tensor for tensor, _ in (*sends, *receives)))
        self._pending.add(id(exchange))
        if not exchange.tensors:
            return exchange
        # Receives first: gloo tells the sender on the same connection, which a large message of ours would block.
        operations = [self._operation(dist.irecv, receives), self._operation(dist.isend, sends)]
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for event in after:
                if event is not None and self._stream:
                    self._stream.wait_event(event)
            exchange.works = dist.batch_isend_irecv([op for ops in operations for op in ops])
            if self._stream:
                for work in exchange.works:
                    work.wait()  # lets this stream wait for NCCL's, not the host
                exchange.arrived = self._stream.record_event()
        return exchange

    def wait(self, exchange: Exchange) -> None:
        """Make the caller's stream (on CPU: the caller) wait until the messages have been sent and received.

        Raises:
            RuntimeError: `exchange` was waited for before, or belongs to another transport; or a peer failed.
        """
        if exchange.done or id(exchange) not in self._pending:
            raise RuntimeError("an exchange was waited for twice, or by a transport that did not start it")
        self._pending.discard(id(exchange))
        exchange.done = True
        if exchange.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(exchange.arrived)
        elif not self._cuda:
            for work in exchange.works:
                work.wait()

    def _operation(self, direction: Callable[..., Any], messages: Sequence[Message]) -> list[dist.P2POp]:
        """Messages of one pair of ranks carry their number as tag, so that gloo matches them in order."""
        count: dict[int, int] = {}
        operations = []
        for tensor, peer in messages:
            tag = count[peer] = count.get(peer, -1) + 1
            operations.append(dist.P2POp(direction, tensor, self._peers[peer], self.group, tag))
        return operations

    def _check(self, tensor: Tensor, peer: int) -> None:
        if not 0 <= peer < self.world or peer == self.rank:
            raise ValueError(f"peer={peer}: expected another rank of the group's {self.world} (this is {self.rank})")
        if not tensor.is_contiguous():
            raise ValueError(f"message of shape {tuple(tensor.shape)} is not contiguous: send a copy")
        if tensor.device.type != self.device.type:
            raise ValueError(f"message on {tensor.device}: expected {self.device}, the transport's own device")


class DirectChannel:
    """Point-to-point messages, sent from the send memory or from the buffers that they came into.

    Args:
        memory: the send memory. without: ranks that get and give their messages another way.
    """

    def __init__(
        self, transport: P2PTransport, program: Program, memory: Callable[[], Tensor], without: Container[int] = ()
    ) -> None:
        self.generation = 0
        self._transport, self._layout, self._memory = transport, program.sends, memory
        self._messages = [[m for m in messages if m.peer not in without] for messages in program.sends.messages]
        self._sources = [
            [each.peer for each in some if each.peer not in without for _ in range(NUM_FIELDS[each.block.kind])]
            for some in program.receives
        ]

    def begin(self) -> int:
        return 0

    def memory(self) -> Tensor:
        return self._memory()

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Sequence[Any]) -> Exchange:
        left = iter(passed)
        sends: list[tuple[Tensor, int]] = []
        for message in self._messages[step]:
            sends += ((_bytes(tensor), message.peer) for tensor in self._fields(message, left))
        into = [(_bytes(tensor), peer) for tensor, peer in zip(receives, self._sources[step], strict=True)]
        return self._transport.start(sends, into, after)

    def _fields(self, message: SentMessage, passed: Iterator[Tensor]) -> list[Tensor]:
        if message.passed:
            return list(islice(passed, NUM_FIELDS[message.block.kind]))
        memory = self.memory()
        spans = self._layout.regions[message.region].spans(message.start, message.block.tokens)
        return [memory[offset : offset + size] for offset, size in spans]

    def wait(self, exchange: Exchange) -> None:
        self._transport.wait(exchange)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
