"""Measuring links, and messages as passes send them: through the channel of a program that does nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ..comm import HybridTransport, Transport
from ..kernels import dense_call
from ..layout import contiguous
from ..metrics.environment import environment
from ..schedules import Attend, Block, Kind, Lowering, MessageSample, Move, Plan, Step, Target, Workload
from ..schedules.cost import GIB
from ..schedules.mask import full
from ..topology import Cluster, Device
from ..topology.measure import measure_links, to_cluster
from .kernels import Place
from .timing import agreed, put_under_load, row_seconds

_CUDA_MESSAGES = (2**16, 2**18, 2**20, 2**22, 2**23, 2**24, 2**25, 2**26, 2**27)
_CPU_MESSAGES = (2**12, 2**16, 2**20)
_REPEATS = 12


def measured_cluster(group: dist.ProcessGroup, device: torch.device) -> Cluster:
    """The links between the ranks of `group`, all of which call this."""
    sizes = (8, 2**26) if device.type == "cuda" else (8, 2**20)
    memory = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None
    described = Device(str(environment()["device"]), memory_gib=memory)
    return to_cluster(measure_links(group, device, sizes=sizes), "measured", described)


class Messages:
    """Every rank sends `size` bytes to each of the ranks `shifts` further, and receives as many."""

    def __init__(self, place: Place, size: int, shifts: Sequence[int]) -> None:
        assert place.links is not None
        self._place, self._links = place, place.links
        n, rank = place.n, dist.get_rank(place.group)
        layout = contiguous(n, n * len(shifts))
        moves = [Move(Block(Kind.KV, r, i, i + 1), r, (r + by) % n) for r in range(n) for i, by in enumerate(shifts)]
        idle: tuple[tuple[Attend, ...], ...] = ((),) * n
        steps = (Step(tuple(moves), idle), Step((), idle))
        plan = Plan("messages", full(layout.length), layout, layout, steps)
        # A token has one head, whose key and value travel as so many bytes.
        lowering = Lowering(plan, Target(Workload(1, 1, 1, kv_row_bytes=size), hosts=self._links.hosts))
        program, sent = lowering.program(rank), torch.zeros(lowering.send_bytes(), dtype=torch.uint8).to(place.device)
        self._channel = self._links.channel(program, sent.numel(), lambda num_bytes: sent[:num_bytes])
        self._into = [torch.empty(size, dtype=torch.uint8, device=place.device) for _ in program.receives[0]]

    def once(self, beside: Callable[[], object] | None = None) -> None:
        """As in a plan's step: the messages are issued first, and may start when the call before is done."""
        self._channel.begin()
        now = self._links.record_event()
        exchange = self._channel.start(0, (), self._into, () if now is None else (now,))
        if beside is not None:
            beside()
        self._channel.wait(exchange)

    def seconds(self, beside: Callable[[], object] | None = None) -> float:
        """Alone, or with something issued after the start, which also loads the device before."""
        return _in_a_row(self._place, lambda: self.once(beside), beside)


def message_costs(place: Place) -> tuple[tuple[MessageSample, ...], float]:
    """Times of sending to the next rank and to all others at once, by size; what each further message costs."""
    sizes: tuple[int, ...] = _CUDA_MESSAGES if place.device.type == "cuda" else _CPU_MESSAGES
    place, others = replace(place, links=_slowest(place.links)), place.n - 1
    samples = [MessageSample(size, 1, Messages(place, size, [1]).seconds()) for size in sizes]
    if others > 1:
        small = [size for size in sizes if size * others <= sizes[-1]]
        samples += [MessageSample(s, others, Messages(place, s, range(1, others + 1)).seconds()) for s in small]
    many = 8
    more = Messages(place, 1024, [1] * many).seconds() - Messages(place, 1024, [1]).seconds()
    return tuple(samples), max(more / (2 * (many - 1)), 0.0)  # each is a send and a receive


def blocking(place: Place) -> float:
    """Share of a message's time that is added to the kernel call that runs beside it."""
    place, kernel = replace(place, links=_slowest(place.links)), place.choose()
    q, k, v, _ = place.qkv(8192, 8192)

    def call() -> object:
        return kernel.forward(q, k, v, dense_call(8192, 8192), scale=1.0)

    messages = Messages(place, 2**27, [1])
    return min(1.0, max(0.0, (messages.seconds(call) - _in_a_row(place, call, call)) / messages.seconds()))


def _slowest(links: Transport | None) -> Transport | None:
    """The slowest link counts, and between hosts messages go point to point."""
    return links.p2p if isinstance(links, HybridTransport) else links


def _in_a_row(place: Place, work: Callable[[], object], load: Callable[[], object] | None) -> float:
    """Seconds of one of many, as ranks agree; `load` puts the device under load before."""

    def measure() -> list[float]:
        if load is not None:
            put_under_load(load, place.device)
        row_seconds(work, place.device, 3)
        return [row_seconds(work, place.device, _REPEATS)]

    return agreed(place.group, measure)[0]
