"""Measuring the links between the ranks of a process group. The only file of this room that knows torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .cluster import GIB
from .measured import Measured, Ping, Sample, probe_pairs

SIZES = (8, 64 * 2**20)


def measure_links(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    host: str | None = None,
) -> Measured:
    """Measure latencies and rates between the ranks of `group`; every rank calls this and gets the same answer.

    Args:
        group: gloo with a CPU device, NCCL with this rank's CUDA device.
        device: where the messages lie.
        sizes: bytes of the small message (latency) and of the large one (rate).
        repeats: how often each is sent; the median counts.
        host: name of the node this rank belongs to (None: the host's name).

    Raises:
        ValueError: fewer than 2 ranks, sizes that do not rise, or hosts with unequal numbers of ranks.
    """
    if dist.get_world_size(group) < 2:
        raise ValueError("group of 1 rank: expected at least 2 to measure links. Start more ranks.")
    if len(sizes) < 2 or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"sizes={tuple(sizes)}: expected two or more rising numbers of bytes. Use {SIZES}.")
    bench = _Bench(group, device, sizes[-1], max(1, repeats))
    hosts = tuple(map(str, bench.gather(host or socket.gethostname())))
    nodes = Measured(hosts, tuple(sizes), (), (), (), ()).nodes()
    bench.everyone(range(bench.n), sizes[0])  # join all ranks before the clock runs
    pings, alone = [], []
    for a, b in probe_pairs(nodes):
        for source, destination in ((a, b), (b, a)):
            pings.append(Ping(source, destination, bench.one_way(source, destination, sizes[0])))
            seconds = bench.one_way(source, destination, sizes[-1])
            alone.append(Sample(source, destination, sizes[-1] / seconds / GIB))
    mine = next(node for node in nodes if bench.rank in node)
    column = [node[mine.index(bench.rank)] for node in nodes]  # the ranks at this rank's place in all nodes
    rounds = []
    for ranks in (mine, column):
        for shift in range(1, len(ranks)):
            rounds += bench.shifted(ranks, shift, sizes[-1])
    inside = bench.everyone(mine, sizes[-1]) if len(mine) > 1 else []
    return Measured(hosts, tuple(sizes), *map(tuple, bench.gather((pings, alone, rounds, inside))[0]))


class _Bench:
    """Timed exchanges of one rank with others of its group. All ranks call the same methods in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, largest: int, repeats: int) -> None:
        self.group, self.device, self.repeats = group, device, repeats
        self.rank, self.n = dist.get_rank(group), dist.get_world_size(group)
        self._peers = dist.get_process_group_ranks(group)
        self._out = torch.zeros(largest, dtype=torch.uint8, device=device)
        self._into: dict[int, Tensor] = {}

    def gather(self, mine: Any) -> list[Any]:
        """`mine` of every rank."""
        found: list[Any] = [None] * self.n
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def one_way(self, source: int, destination: int, size: int) -> float:
        """Seconds of one message while all other ranks are silent: half of there and back.

        There is `size` long; for rates (any but the smallest size) back is one byte, so that it is a single direction
        that is timed.
        """
        back = size if size < 4096 else 1
        other = destination if self.rank == source else source

        def exchange() -> None:
            if self.rank == source:
                self._swap([(other, size)], [])
                self._swap([], [(other, back)])
            elif self.rank == destination:
                self._swap([], [(other, size)])
                self._swap([(other, back)], [])

        seconds = self._timed(exchange)
        both: float = self.gather(seconds)[source]
        return both / 2 if back == size else both

    def shifted(self, ranks: Sequence[int], shift: int, size: int) -> list[Sample]:
        """Every rank sends to the one `shift` places on in its own `ranks`, the whole group at once."""
        place = ranks.index(self.rank)
        to, source = ranks[(place + shift) % len(ranks)], ranks[place - shift]
        seconds = self._timed(lambda: self._swap([(to, size)], [(source, size)]))
        return self.gather(Sample(self.rank, to, size / seconds / GIB))

    def everyone(self, ranks: Sequence[int], size: int) -> list[Sample]:
        """Every rank sends to all others of `ranks` at once: GiB/s that each gets out in all."""
        others = [(rank, size) for rank in ranks if rank != self.rank]
        seconds = self.gather(self._timed(lambda: self._swap(others, others)))
        return [Sample(rank, rank, len(others) * size / seconds[rank] / GIB) for rank in range(self.n)]

    def _swap(self, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]]) -> None:
        """Send and receive so many bytes to and from ranks, all in flight at once, and wait for them."""
        ops = [
            dist.P2POp(dist.isend, self._out[:size], self._peers[rank], group=self.group) for rank, size in sends
        ] + [
            dist.P2POp(dist.irecv, self._buffer(rank, size), self._peers[rank], group=self.group)
            for rank, size in receives
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def _buffer(self, rank: int, size: int) -> Tensor:
        if rank not in self._into or self._into[rank].numel() < size:
            self._into[rank] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._into[rank][:size]

    def _timed(self, exchange: Callable[[], None]) -> float:
        """Median seconds of `exchange`, from all ranks being ready until it is done on this one."""
        seconds = []
        for _ in range(self.repeats + 1):
            self._ready()
            start = time.perf_counter()
            exchange()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        return sorted(seconds[1:])[self.repeats // 2]  # the first one warms up

    def _ready(self) -> None:
        dist.barrier(self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
