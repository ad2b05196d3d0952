"""Messages over peer memory: receivers pull the rows that they need from the senders' memory.

Everything that a pass sends is in memory that its peers can read. A sender sets a flag at the receiver once its data is
complete; the receiver waits for the flag, reads the data and sets a flag at the sender. The memory is double-buffered:
passes alternate between two memories, so no pass waits for the readers of the previous one.

If kernels run meanwhile, the copy engine copies the messages on a separate stream (`start`, `wait`). It occupies no
SMs, unlike every message of an NCCL ring. If nothing is computed meanwhile, the caller's stream waits and its kernels
read the senders' memory directly (`acquire`, `release`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import refuse
from ..plans.recording import Recording
from .collectives import PeerMemoryError, all_or_none, gather_objects
from .device import synchronize
from .p2p import NAN_BYTE, Exchange, P2PTransport, Sizes, Transport
from .symmetric import FlagOperations, allocate, free_cached_memory, why_no_peer_memory

_READY, _READ = 0, 1
_INITIAL_STEPS = 64
"""The number of steps that have flags at first. A flag takes few bytes, so most plans need no reallocation."""
_INITIAL_BYTES, _INITIAL_BYTES_GROWING = 2**20, 2**26
"""The size of a memory at first, and if passes will need more and more."""


class PeerTransport(Transport):
    """Peer memory among the ranks of a process group.

    Args:
        growth: the least factor by which memory grows, for passes that need slightly more each time. If it is above 1,
            the memory has 64 MiB at first, otherwise 1 MiB.
        key: the setting that chose this transport, for messages.

    Raises PeerMemoryError: symmetric memory cannot be set up; raised by all ranks alike.
    """

    name = "peer"
    over_peers = True
    _error = PeerMemoryError

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, growth: float = 1.0, key: str = "transport"
    ) -> None:
        super().__init__(group, device)
        self._growth = growth
        self._remedy = (
            f"Choose {key}=p2p, which needs none, or let ranks send less: shorter sequences, more context-parallel "
            "ranks, another schedule."
        )
        self.stream, self.signals = all_or_none(
            group, lambda: (_stream(device), _stream(device)), "setting up peer memory", self._remedy
        )
        self.generation = 0
        self._capacity = self._steps = 0
        self._memories: list[Any] = []
        self._flags: Any = None
        self._parity = 0
        self._unread: list[FlagOperations | None] = [None, None]
        self.here: Any = None  # the caller's stream during a pass
        # Allocate now, where the caller can handle a refusal; the memory grows when a pass needs more.
        initial = _INITIAL_BYTES_GROWING if growth > 1 else _INITIAL_BYTES
        self._reallocate(initial, initial, _INITIAL_STEPS)

    def channel(self, recording: Recording, num_bytes: int, memory: Any = None) -> SymmetricExchange:
        return SymmetricExchange(self, recording, num_bytes)

    def ensure_capacity(self, num_bytes: int, steps: int) -> None:
        """Ensure that there is memory for passes in which ranks send up to `num_bytes` in `steps` steps.

        All ranks call this with the same numbers before each such pass. They wait for each other only if it has to
        grow.

        Raises:
            PeerMemoryError: a rank cannot allocate it, raised by all ranks alike; or a pass was broken off before, on
                any rank if memory has to grow, otherwise on this one.
        """
        self.recover()
        if num_bytes <= self._capacity and steps <= self._steps:
            self.refuse_if(self._broken)
            return
        self.refuse_if(next((each for each in gather_objects(self.group, self._broken) if each is not None), None))
        least = max(self._capacity, num_bytes)
        wanted = max(least, int(self._growth * self._capacity)) if num_bytes > self._capacity else least
        self._reallocate(wanted, least, max(steps, 2 * self._steps) if steps > self._steps else self._steps)

    def begin(self, unread: Sequence[FlagOperations]) -> int:
        """Start a pass on the caller's stream, and return its parity: which of the two memories it uses.

        The stream waits until the peers have read what the memory contains.

        unread: per parity, the operation that waits until the peers have read this pass's messages.
        """
        self._passes += 1
        self._parity = 1 - self._parity
        before, self.here = self._unread[self._parity], torch.cuda.current_stream(self.device)
        if before is not None:
            before.issue(self.here)
        self._unread[self._parity] = unread[self._parity]
        return self._parity

    def views(self, parity: int) -> list[Tensor]:
        """Return views of all ranks' memories of this parity."""
        memory, shape = self._memories[parity], (self._capacity,)
        with torch.inference_mode(False):  # the views outlive the call that creates them
            return [memory.get_buffer(rank, shape, torch.uint8) for rank in range(self.world)]

    def flag(self, owner: int, parity: int, step: int, other: int, kind: int) -> int:
        """Return the address of the flag that rank `other` sets at rank `owner`."""
        index = ((parity * self._steps + step) * self.world + other) * 2 + kind
        return int(self._flags.buffer_ptrs[owner]) + 4 * index

    def _reallocate(self, wanted: int, least: int, steps: int) -> None:
        """Replace the memory by one of `wanted` bytes, or of `least` if that fails, with flags for `steps` steps."""
        for capacity in dict.fromkeys((wanted, least)):
            try:
                self._allocate(capacity, steps)
                break
            except PeerMemoryError:
                if capacity == least:
                    self._capacity = self._steps = 0  # on all ranks: the next pass allocates what it needs
                    raise
        self._capacity, self._steps = capacity, steps
        self._unread = [None, None]
        self.generation += 1

    def _allocate(self, capacity: int, steps: int) -> None:
        sizes = [max(1, capacity)] * 2 + [2 * steps * self.world * 2 * 4]
        what = f"setting up peer memory (2 x {capacity / 2**30:.2f} GiB on every rank)"
        try:
            all_or_none(self.group, lambda: synchronize(self.device), what, self._remedy)
            # Now no rank reads the old memory, which is freed here.
            self._memories, self._flags = [], None
            free_cached_memory(self.device, sum(sizes))
            *self._memories, self._flags = allocate(self.group, self.device, sizes, self._remedy, what)
        except PeerMemoryError:
            self._memories, self._flags = [], None
            raise


class _Step(NamedTuple):
    """The prepared views and flag operations of a step, for one parity. Views are per field."""

    ready: FlagOperations  # tells the receivers of only this rank's own rows that these are complete
    ready_passed: FlagOperations  # tells the receivers of other ranks' rows, which this rank has to copy first
    passed: list[Tensor]  # send memory for these
    reusable: FlagOperations | None  # waits until earlier messages whose memory this step reuses have been read
    arrived: FlagOperations  # waits for all senders at once, because a wait per sender costs more than it gains
    sources: list[Tensor]  # the senders' memory
    exchanged: FlagOperations  # `ready`, then `arrived`, in one call of the driver
    order: list[int]  # in which to copy the sources
    read: FlagOperations  # tells the senders


class SymmetricExchange:
    """The channel of a recording over peer memory; see `Channel`.

    Call `begin`, fill the send memory, then for each step call `start` and `wait`, or `acquire` and `release`.

    num_bytes: the send memory of the rank that sends most.
    """

    def __init__(self, transport: PeerTransport, recording: Recording, num_bytes: int) -> None:
        self._transport, self._layout, self._num_bytes = transport, recording.sends, num_bytes
        self._incoming = [
            [(each.peer, span) for each in receives for span in each.spans] for receives in recording.receives
        ]
        self._prepared_generation = -1
        self._parity = 0
        self._started = False  # whether this pass has used the transport's streams
        self._next: int | None = None  # the first step whose messages have not started
        self._acquired: int | None = None

    @property
    def generation(self) -> int:
        return self._transport.generation

    def begin(self) -> int:
        """Start a pass on the caller's stream, and return its parity. Refuse a capture into a CUDA graph."""
        self._next = self._acquired = None
        if self._transport.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "attention over peer memory was captured into a CUDA graph, which cannot be replayed: passes alternate "
                "between two memories. Leave attention out of the graph, or choose transport=p2p."
            )
        self._transport.ensure_capacity(self._num_bytes, len(self._incoming))
        if self._prepared_generation != self._transport.generation:
            self._prepare()
        self._parity = self._transport.begin(self._unread)
        self._started = False
        self._next = 0
        return self._parity

    def memory(self) -> Tensor:
        return self._views[self._parity][self._transport.rank]

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Any) -> Exchange:
        """Start the messages of a step; see `Channel.start`."""
        stream, signals = self._transport.stream, self._transport.signals
        now = self._steps[self._parity][step]
        if not self._layout.messages[step] and not receives and now.reusable is None:
            self._next = step + 1
            return Exchange()
        self._started, self._next = True, None
        for event in after:
            signals.wait_event(event)
        now.ready.issue(signals)
        # Peers set the flags that are awaited below only after they see these. A device may have a single queue for all
        # streams (CUDA_DEVICE_MAX_CONNECTIONS=1), so the waits must be issued after these flags. This also makes the
        # stream wait for `after`.
        stream.wait_stream(signals)
        with torch.cuda.stream(stream) if passed or receives else nullcontext():
            if now.reusable is not None:
                now.reusable.issue(stream)
            if passed:
                for i, tensor in enumerate(passed):
                    _view_like(now.passed, i, tensor).copy_(tensor)
                now.ready_passed.issue(stream)
            now.arrived.issue(stream)
            for i in now.order:
                receives[i].copy_(_view_like(now.sources, i, receives[i]))
            now.read.issue(stream)
            used = receives or passed or now.reusable is not None
            self._next = step + 1
            return Exchange(arrived=stream.record_event() if used else None)

    def acquire(self, step: int, receives: Sequence[Any]) -> list[Tensor]:
        """Send and wait for the messages of a step on the caller's stream, if nothing is computed meanwhile.

        Return views of the senders' memory, with the shapes and dtypes of `receives`. They may be read on the caller's
        stream until `release`.
        """
        here, now = self._transport.here, self._steps[self._parity][step]
        if self._started:
            # If streams share a queue, the flags that peers await before they send must be issued first.
            here.wait_stream(self._transport.signals)
        self._next = None
        now.exchanged.issue(here)
        self._next, self._acquired = step + 1, step
        return [_view_like(now.sources, i, tensor) for i, tensor in enumerate(receives)]

    def release(self, step: int) -> None:
        """Tell the senders that the work issued so far to the caller's stream has read the acquired memory."""
        self._acquired = None
        self._steps[self._parity][step].read.issue(self._transport.here)

    def wait(self, exchange: Exchange) -> None:
        if exchange.arrived is not None:
            self._transport.here.wait_event(exchange.arrived)

    def finish(self, sizes: Sizes) -> None:
        stream, signals, here = self._transport.stream, self._transport.signals, self._transport.here
        if self._next is None:
            raise RuntimeError("it failed while messages started")
        if self._acquired is not None:
            self.release(self._acquired)
        # The pass may still be writing to its send memory. Beside these writes, a value could become half NaN.
        stream.wait_stream(here)
        with torch.cuda.stream(stream):  # after all copies, or messages that use their memory again would have these
            self.memory().fill_(NAN_BYTE)
        signals.wait_stream(stream)
        for now in self._steps[self._parity][self._next :]:
            now.ready.issue(signals)
            now.ready_passed.issue(signals)
            stream.wait_stream(signals)
            if now.reusable is not None:
                now.reusable.issue(stream)
            now.arrived.issue(stream)
            now.read.issue(stream)
        here.wait_stream(stream)

    def _prepare(self) -> None:
        """Prepare all views and flag operations for the current memory."""
        transport = self._transport
        self._views = [transport.views(parity) for parity in range(2)]
        steps = range(len(self._incoming))
        awaited = {t for earlier in self._layout.awaits.values() for t in earlier}
        self._steps = [[self._step(parity, t) for t in steps] for parity in range(2)]
        self._unread = [self._await_readers(parity, [t for t in steps if t not in awaited]) for parity in range(2)]
        self._prepared_generation = transport.generation

    def _step(self, parity: int, t: int) -> _Step:
        transport, me, incoming = self._transport, self._transport.rank, self._incoming[t]
        messages = self._layout.messages[t]
        passed_to = sorted({m.peer for m in messages if m.passed})  # one flag covers all messages to a rank
        others = sorted({m.peer for m in messages} - set(passed_to))
        senders = sorted({peer for peer, _ in incoming})
        passed = [(self._layout.regions[m.region], m) for m in messages if m.passed]
        reused = self._layout.awaits.get(t)
        ready = FlagOperations.set([transport.flag(p, parity, t, me, _READY) for p in others])
        arrived = FlagOperations.wait_and_clear([transport.flag(me, parity, t, p, _READY) for p in senders])
        return _Step(
            ready=ready,
            ready_passed=FlagOperations.set([transport.flag(p, parity, t, me, _READY) for p in passed_to]),
            passed=[self._bytes(parity, me, span) for region, m in passed for span in region.spans(0, m.block.tokens)],
            reusable=None if reused is None else self._await_readers(parity, reused),
            arrived=arrived,
            exchanged=ready.then(arrived),
            sources=[self._bytes(parity, peer, span) for peer, span in incoming],
            # Each rank begins with another peer, so that they do not all read from the same one.
            order=sorted(range(len(incoming)), key=lambda i: (incoming[i][0] - me) % transport.world),
            read=FlagOperations.set([transport.flag(p, parity, t, me, _READ) for p in senders]),
        )

    def _bytes(self, parity: int, rank: int, span: tuple[int, int]) -> Tensor:
        offset, size = span
        with torch.inference_mode(False):
            return self._views[parity][rank][offset : offset + size]

    def _await_readers(self, parity: int, steps: Sequence[int]) -> FlagOperations:
        """Return the operation that waits until the messages of these steps have been read."""
        transport, sends = self._transport, self._layout.messages
        readers = [(t, peer) for t in steps for peer in sorted({message.peer for message in sends[t]})]
        return FlagOperations.wait_and_clear(
            [transport.flag(transport.rank, parity, t, peer, _READ) for t, peer in readers]
        )


def _view_like(views: list[Tensor], i: int, tensor: Tensor) -> Tensor:
    """Return the bytes `views[i]` with the dtype and shape of `tensor`, and cache the view in their place."""
    if views[i].dtype != tensor.dtype or views[i].shape != tensor.shape:
        with torch.inference_mode(False):
            views[i] = views[i].view(-1).view(tensor.dtype).view(tensor.shape)
    return views[i]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


logger = logging.getLogger(__name__)

TRANSPORTS = "auto", "peer", "p2p"


def choose_transport(
    name: str, group: dist.ProcessGroup, device: torch.device, growth: float = 1.0, key: str = "transport"
) -> Transport:
    """Return the transport of `group`, of the same kind on all ranks. Collective.

    name: `peer` for peer memory, `p2p` for point-to-point messages, or `auto` for peer memory if all ranks can read
        each other's memory and point-to-point messages otherwise, for which rank 0 logs the reason.
    growth: of peer memory, see `PeerTransport`.
    key: what `name` is called where it comes from, for messages.

    Raises ValueError: an unknown name, or `peer` where peer memory is not available.
    """
    if name not in TRANSPORTS:
        raise refuse(key, name, "one of " + ", ".join(TRANSPORTS), f"Set {key} to one of these.")
    if name == "p2p" or (name == "auto" and device.type != "cuda"):
        return P2PTransport(group, device)
    reason = why_no_peer_memory(group, device)
    if reason is None:
        try:
            return PeerTransport(group, device, growth, key)
        except PeerMemoryError as error:  # raised by all ranks alike
            reason = str(error).rstrip(".")
    if name == "peer":
        raise ValueError(
            f"{key}=peer: expected GPUs that can read each other's memory, but {reason}. Choose auto or p2p."
        )
    if dist.get_rank(group) == 0:
        logger.warning("attention's messages go point to point, not through peer memory: %s", reason)
    return P2PTransport(group, device)
