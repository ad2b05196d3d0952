"""Messages over peer memory: senders publish, and receivers pull just the rows that they need.

What a pass sends lies in memory that its peers can read (symmetric memory). A sender sets a flag with the receiver once
its data is complete; the receiver waits for the flag, reads, and sets a flag back. There are two such memories, used by
passes in turn, so that a pass never waits for the readers of the one before it.

Beside kernels, messages are copied on a stream of their own by the copy engine, which takes no processor from them, as
every message of a NCCL ring does (`start`, `wait`). Where nothing is computed meanwhile, the caller's stream waits and
its kernels read them (`acquire`, `release`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..schedules.program import Program
from .collect import PeerMemoryError, all_or_none, from_all
from .flags import FlagOperations
from .hosts import Hosts
from .p2p import Exchange
from .rendezvous import timeout_of
from .symmetric import finish, make_room, remedy_by, share

_READY, _DONE = 0, 1
_STEPS = 64
"""Steps that there are flags for at first, a few bytes each: memory is not made anew for a plan of some more."""
_LEAST, _LEAST_GROWING = 2**20, 2**26
"""Bytes at first, and where passes are to need more and more."""


class PeerTransport:
    """Peer memory among the ranks of one process group, all of which construct it together.

    Args:
        group: the ranks that send to each other.
        device: this rank's CUDA device.
        hosts: who can read whose memory; None for all each other's. Others than these get no messages here.
        growth: where more memory is needed, take at least so many times what there was: for passes that need a little
            more every time. If it is above 1, 64 MiB are taken at first, else 1 MiB.
        key: the setting that chose it, for messages.

    Raises:
        PeerMemoryError: symmetric memory cannot be set up; raised by all ranks alike.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        hosts: Hosts | None = None,
        growth: float = 1.0,
        key: str = "attention.transport",
    ) -> None:
        self.group, self.device, self._growth, self._key = group, device, growth, key
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        everybody = tuple(range(self.world))
        self.hosts = tuple(everybody if hosts is None else hosts.of(rank) for rank in everybody)
        """By rank, the ranks that read its memory."""
        self.peers = self.hosts[self.rank]
        self._broken: str | None = None
        self.stream, self.signals, self._sharing = all_or_none(
            group,
            lambda: (_stream(device), _stream(device), self._sharing_group()),
            "setting up peer memory",
            remedy_by(key),
        )
        if hosts is not None:
            self._check_groups()
        self.generation = 0
        self._capacity = self._steps = 0
        self._halves: list[Any] = []
        self._flags: Any = None
        self._turn = 0
        self._unread: list[FlagOperations | None] = [None, None]
        # Here, where it can be refused; it grows when a pass needs more.
        self._reserve(_LEAST_GROWING if growth > 1 else _LEAST, _STEPS)

    def now(self) -> torch.cuda.Event:
        """A mark after all work issued so far by the caller's stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def channel(self, program: Program, num_bytes: int, memory: Any = None) -> SymmetricExchange:
        """The messages of a program; see `channel.Transport`."""
        return SymmetricExchange(self, program, num_bytes)

    def provide(self, num_bytes: int, steps: int) -> None:
        """See that there is memory for passes that send so much from some rank, in so many steps. All ranks call this
        with the same numbers before such a pass; they meet where it has to grow, and there only.

        Raises:
            PeerMemoryError: no memory for it on some rank, raised by all ranks alike; or a pass was broken off before,
                on any rank where memory has to grow, else on this one.
        """
        if num_bytes <= self._capacity and steps <= self._steps:
            self._refuse_if(self._broken)
            return
        self._refuse_if(next((each for each in from_all(self.group, self._broken) if each is not None), None))
        capacity = max(self._capacity, num_bytes)
        wanted = max(capacity, int(self._growth * self._capacity)) if num_bytes > self._capacity else capacity
        self._reserve(wanted, max(steps, 2 * self._steps) if steps > self._steps else self._steps, capacity)

    def begin(self, unread: Sequence[FlagOperations]) -> int:
        """Start a pass: once all have read what lies there, memory `turn` is this pass's. Returns the turn.

        Args:
            unread: by turn, takes the flags by which the peers will say that they have read this pass's messages.
        """
        self._turn = 1 - self._turn
        before = self._unread[self._turn]
        if before is not None:
            before.issue(torch.cuda.current_stream(self.device))
        self._unread[self._turn] = unread[self._turn]
        return self._turn

    def break_off(self, error: BaseException) -> None:
        """A pass has ended with `error` on this rank: some flags that others wait for will never be set."""
        self._broken = self._broken or f"{type(error).__name__}: {error}".split("\n", 1)[0]

    def bytes_of(self, turn: int, rank: int) -> Tensor:
        """All of a rank's memory, as seen from here."""
        found: Tensor = self._halves[turn].get_buffer(self.peers.index(rank), (self._capacity,), torch.uint8)
        return found

    def flag(self, owner: int, turn: int, step: int, other: int, kind: int) -> int:
        """Address of the flag that rank `other` sets with rank `owner`."""
        index = ((turn * self._steps + step) * self.world + other) * 2 + kind
        return int(self._flags.buffer_ptrs[self.peers.index(owner)]) + 4 * index

    def _refuse_if(self, broken: str | None) -> None:
        if broken is not None:
            raise PeerMemoryError(
                f"attention over peer memory was broken off before ({broken}): ranks would wait for messages that "
                f"never come. Start the job again, training from its checkpoint, or choose {self._key}=p2p."
            )

    def _sharing_group(self) -> dist.ProcessGroup | None:
        """Of this rank and its peers; None for a rank without any."""
        if len(self.peers) == self.world:
            return self.group
        if len(self.peers) == 1:
            return None
        if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
            raise RuntimeError("init_process_group was given a device_id, so that only all ranks can divide the group")
        ranks = dist.get_process_group_ranks(self.group)
        # NCCL connects nobody yet, so that a group which others know by another name does no harm.
        found: dist.ProcessGroup = dist.new_group(
            [ranks[rank] for rank in self.peers],
            timeout=timeout_of(self.group),
            backend="nccl" if self.device.type == "cuda" else None,
            use_local_synchronization=True,
        )
        return found

    def _check_groups(self) -> None:
        """Peers meet by their group's name, which torch makes from its ranks and how many groups a rank is in."""
        names = from_all(self.group, getattr(self._sharing, "group_name", None))

        def check() -> None:
            if any(names[peer] != names[self.rank] for peer in self.peers):
                raise RuntimeError("the ranks of a host have made different numbers of process groups")

        all_or_none(self.group, check, "dividing the group by hosts", remedy_by(self._key))

    def _reserve(self, capacity: int, steps: int, least: int | None = None) -> None:
        """Memory for `capacity` bytes and the flags of `steps` steps, in place of what there is; for `least` bytes
        where so many cannot be had."""
        try:
            self._capacity = self._take(capacity, steps)
        except PeerMemoryError as error:
            if least is None or least == capacity:
                self.break_off(error)
                raise
            self._reserve(least, steps)
            return
        self._steps = steps
        self._unread = [None, None]
        self.generation += 1

    def _take(self, capacity: int, steps: int) -> int:
        """`capacity`, once it is there."""
        sizes = [max(1, capacity)] * 2 + [2 * steps * self.world * 2 * 4]
        what = f"setting up peer memory (2 x {capacity / 2**30:.2f} GiB on every rank)"
        remedy = remedy_by(self._key)
        try:
            all_or_none(self.group, lambda: finish(self.device), what, remedy)
            # Nobody reads what is given back here.
            self._halves, self._flags = [], None
            make_room(self.device, sum(sizes))
            *self._halves, self._flags = share(self.group, self._sharing, self.device, sizes, what, remedy)
        except PeerMemoryError:
            self._halves, self._flags = [], None
            raise
        return capacity


class SymmetricExchange:
    """The messages of one kind of pass over peer memory: `begin`, fill the send memory, then step by step `start` and
    `wait`, or `acquire` and `release`.

    Args:
        num_bytes: of the rank that sends most.
    """

    def __init__(self, transport: PeerTransport, program: Program, num_bytes: int) -> None:
        self._transport, self._layout, self._num_bytes = transport, program.sends, num_bytes
        self._steps = len(program.receives)
        # What other ranks than the peers get, or send, goes another way.
        self._sends = [[m for m in messages if m.peer in transport.peers] for messages in program.sends.messages]
        self._incoming = [
            [(each.peer, span) for each in some if each.peer in transport.peers for span in each.spans]
            for some in program.receives
        ]
        self._generation = -1
        self._turn = 0
        self._started = False  # whether the transport's streams were given anything in this pass

    @property
    def generation(self) -> int:
        """Counts up when the memory has moved."""
        return self._transport.generation

    def begin(self) -> int:
        """Start a pass on the caller's stream; returns which of the two memories it uses.

        Raises:
            RuntimeError: the pass is being captured into a CUDA graph, which could not be replayed.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "attention over peer memory was captured into a CUDA graph, which cannot be replayed: its memories "
                "take turns. Leave attention out of the graph, or choose attention.transport=p2p."
            )
        self._transport.provide(self._num_bytes, self._steps)
        if self._generation != self._transport.generation:
            self._prepare()
        self._turn = self._transport.begin(self._unread)
        self._started = False
        return self._turn

    def memory(self) -> Tensor:
        """This rank's send memory, to be filled on the caller's stream before the step that sends it."""
        return self._theirs[self._turn][self._transport.rank]

    def start(self, step: int, passed: Sequence[Tensor], receives: Sequence[Tensor], after: Any) -> Exchange:
        """Start a step's messages.

        Args:
            passed: what has come from other ranks and goes on, in the order of the messages.
            receives: contiguous, in the order of the plan.
            after: the mark that messages wait for, or several.
        """
        transport, turn = self._transport, self._turn
        stream = transport.stream
        awaits = step in self._layout.awaits
        if not self._sends[step] and not receives and not awaits:
            return Exchange()
        self._started = True
        ready, ready_passed = self._ready[turn][step]
        for event in after:
            transport.signals.wait_event(event)
        ready.issue(transport.signals)
        # What is waited for below, peers do once they see these flags. A device may have one queue for all streams
        # (CUDA_DEVICE_MAX_CONNECTIONS=1), in which the waiting must not come first. With the flags the stream waits
        # for all that they waited for.
        stream.wait_stream(transport.signals)
        with torch.cuda.stream(stream) if passed or receives else nullcontext():
            if awaits:
                self._read[turn][step].issue(stream)
            if passed:
                rooms = self._rooms[turn][step]
                for i, tensor in enumerate(passed):
                    _seen_as(rooms, i, tensor).copy_(tensor)
                ready_passed.issue(stream)
            # All flags at once: a wait of its own for every peer would cost more than it gains.
            come, sources, nearest_first, read = self._arrivals[turn][step]
            come.issue(stream)
            for i in nearest_first:
                receives[i].copy_(_seen_as(sources, i, receives[i]))
            read.issue(stream)
            return Exchange(arrived=stream.record_event() if receives or passed or awaits else None)

    def acquire(self, step: int, receives: Sequence[Tensor]) -> list[Tensor]:
        """Hand over and wait for a step's messages on the caller's stream, where nothing is done meanwhile anyway.

        Returns:
            What tensors like `receives` are to get, where the senders have it: to be read on the caller's stream before
            `release`.
        """
        here, turn = torch.cuda.current_stream(self._transport.device), self._turn
        come, sources, _, _ = self._arrivals[turn][step]
        if self._started:
            # Of streams that share a queue: what peers wait for before they send must come first.
            here.wait_stream(self._transport.signals)
        self._ready[turn][step][0].issue(here)
        come.issue(here)
        return [_seen_as(sources, i, tensor) for i, tensor in enumerate(receives)]

    def release(self, step: int) -> None:
        """What `acquire` gave has been read by all that the caller's stream was told so far."""
        self._arrivals[self._turn][step][3].issue(torch.cuda.current_stream(self._transport.device))

    def wait(self, exchange: Exchange) -> None:
        """Make the caller's stream wait until the messages are in."""
        if exchange.arrived is not None:
            torch.cuda.current_stream(self._transport.device).wait_event(exchange.arrived)

    def _prepare(self) -> None:
        """Views and flag operations for the memory as it is now."""
        transport, me = self._transport, self._transport.rank
        self._theirs: list[dict[int, Tensor]] = [{}, {}]
        if len(transport.peers) > 1:
            with torch.inference_mode(False):  # they outlive the call that needs them first
                self._theirs = [{peer: transport.bytes_of(turn, peer) for peer in transport.peers} for turn in range(2)]
        self._ready, self._rooms, self._arrivals, self._read, self._unread = [], [], [], [], []
        early = {step for steps in self._layout.awaits.values() for step in steps}
        for turn in range(2):
            ready, rooms, arrivals = [], [], []
            for t, messages in enumerate(self._sends):
                passing = sorted({m.peer for m in messages if m.passed})  # their flag waits for all that goes there
                others = sorted({m.peer for m in messages} - set(passing))
                ready.append(
                    tuple(FlagOperations.set([transport.flag(p, turn, t, me, _READY) for p in group])
                          for group in (others, passing))
                )  # fmt: skip
                regions = [(self._layout.regions[m.region], m) for m in messages if m.passed]
                rooms.append(
                    [self._bytes(turn, me, span) for region, m in regions for span in region.spans(0, m.block.tokens)]
                )
                coming = self._incoming[t]
                # Every rank begins with another peer, so that they do not all read from the same one.
                nearest_first = sorted(range(len(coming)), key=lambda i: (coming[i][0] - me) % transport.world)
                senders = sorted({peer for peer, _ in coming})
                arrivals.append(
                    (
                        FlagOperations.take([transport.flag(me, turn, t, peer, _READY) for peer in senders]),
                        [self._bytes(turn, peer, span) for peer, span in coming],
                        nearest_first,
                        FlagOperations.set([transport.flag(peer, turn, t, me, _DONE) for peer in senders]),
                    )
                )
            self._ready.append(ready)
            self._rooms.append(rooms)
            self._arrivals.append(arrivals)
            self._read.append({t: self._taken(turn, steps) for t, steps in self._layout.awaits.items()})
            self._unread.append(self._taken(turn, [t for t in range(self._steps) if t not in early]))
        self._generation = transport.generation

    def _bytes(self, turn: int, rank: int, span: tuple[int, int]) -> Tensor:
        """(offset, bytes) of a rank's memory."""
        offset, size = span
        with torch.inference_mode(False):
            return self._theirs[turn][rank][offset : offset + size]

    def _taken(self, turn: int, steps: Sequence[int]) -> FlagOperations:
        """Wait until the messages of these steps have been read, and clear the flags that say so."""
        transport, sends = self._transport, self._sends
        readers = [(t, peer) for t in steps for peer in sorted({message.peer for message in sends[t]})]
        return FlagOperations.take([transport.flag(transport.rank, turn, t, peer, _DONE) for t, peer in readers])


def _seen_as(views: list[Tensor], i: int, tensor: Tensor) -> Tensor:
    """View number i of the same bytes every time, with the dtype and shape of `tensor`, which stay the same."""
    if views[i].dtype != tensor.dtype or views[i].shape != tensor.shape:
        with torch.inference_mode(False):
            views[i] = views[i].view(-1).view(tensor.dtype).view(tensor.shape)
    return views[i]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
