"""Measurements of the links between the ranks of a process group, and the cluster description that fits them.

This is the only file of this wing that imports torch.
"""

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.cluster import GIB, Cluster, Device, Intra, Mesh, Network, Switch
from ..core.comm.collectives import gather_objects
from ..core.comm.device import synchronize

_PING_BYTES = 8
_MESH_SHARE = 0.6  # a mesh delivers at least this share of all its links together; a switch about 1 / (ranks - 1)
_SMALLEST = 1e-6  # GiB/s; keeps a description valid if a clock cannot resolve a transfer


class Sample(NamedTuple):
    """One measured rate: `gibps` from `source` to `destination`. The list that it is in defines the load.

    latency_s: of small messages in one direction; only measured for pairs that are alone.
    """

    source: int
    destination: int
    gibps: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class LinkMeasurements:
    """The results of `measure_links`."""

    hosts: tuple[str, ...]  # the name of every rank's node
    alone: tuple[Sample, ...] = ()  # pairs measured while all other ranks are silent
    # All ranks together, each sending to one rank and receiving from one: the k-th next of its node, for each k, or its
    # counterpart in the k-th next node.
    rounds: tuple[Sample, ...] = ()
    # Every rank sends to all ranks of its node together; the total rate of each (destination: itself).
    inside: tuple[Sample, ...] = ()

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every node, nodes in the order of their first rank.

        Refuse nodes of different sizes, and ranks that are not numbered node by node.
        """
        groups: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            groups.setdefault(host, []).append(rank)
        nodes = tuple(map(tuple, groups.values()))
        if len(set(map(len, nodes))) != 1 or [r for node in nodes for r in node] != list(range(len(self.hosts))):
            raise ValueError(
                f"hosts {', '.join(self.hosts)}: expected equally many ranks on each, numbered node by node. "
                f"Start the same number of ranks on every host, in order."
            )
        return nodes


def measure_links(
    group: dist.ProcessGroup, device: torch.device, *, size: int = 64 * 2**20, repeats: int = 5, host: str | None = None
) -> LinkMeasurements:
    """Measure latencies and rates between the ranks of `group`. Every rank calls this and gets the same result.

    Refuse fewer than 2 ranks, and hosts with unequal numbers of ranks.

    Args:
        group: gloo with a CPU device, NCCL with this rank's CUDA device.
        size: bytes of a message whose rate is measured.
        repeats: how often each message is sent; the median counts.
        host: the name of this rank's node; None for the host's name.
    """
    if dist.get_world_size(group) < 2:
        raise ValueError("group of 1 rank: expected at least 2 to measure links. Start more ranks.")
    links = _Links(group, device, size, repeats)
    hosts = tuple(map(str, gather_objects(group, host or socket.gethostname())))
    nodes = LinkMeasurements(hosts).nodes()
    links.all_to_all(range(links.n), _PING_BYTES)  # connect all ranks before the clock runs
    alone = []
    for a, b in probe_pairs(nodes):
        for pair in ((a, b), (b, a)):
            latency, seconds = (links.one_way(*pair, num_bytes) for num_bytes in (_PING_BYTES, size))
            alone.append(Sample(*pair, size / seconds / GIB, latency))
    own_node = next(node for node in nodes if links.rank in node)
    column = [node[own_node.index(links.rank)] for node in nodes]  # this rank's counterparts in all nodes
    rounds = []
    for ranks in (own_node, column):
        for shift in range(1, len(ranks)):
            rounds += links.shifted(ranks, shift, size)
    inside = links.all_to_all(own_node, size) if len(own_node) > 1 else []
    return LinkMeasurements(hosts, *map(tuple, gather_objects(group, (alone, rounds, inside))[0]))


class _Links:
    """Timed exchanges of one rank with others of its group. All ranks call the same methods in the same order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, largest: int, repeats: int) -> None:
        self.group, self.device, self.repeats = group, device, repeats
        self.rank, self.n = dist.get_rank(group), dist.get_world_size(group)
        self._peers = dist.get_process_group_ranks(group)
        self._send_buffer = torch.zeros(largest, dtype=torch.uint8, device=device)
        self._recv_buffers: dict[int, Tensor] = {}

    def one_way(self, source: int, destination: int, size: int) -> float:
        """Return the seconds of one message while all other ranks are silent: half of a round trip.

        The answer to a message of `size` bytes is as long; for rates (4,096 bytes and more) it is one byte, so that a
        single direction is timed.
        """
        back = size if size < 4096 else 1

        def exchange() -> None:
            for a, b, num_bytes in ((source, destination, size), (destination, source, back)):
                if self.rank in (a, b):
                    self._swap([(b, num_bytes)] if self.rank == a else [], [(a, num_bytes)] if self.rank == b else [])

        round_trip: float = gather_objects(self.group, self._timed(exchange))[source]
        return round_trip / 2 if back == size else round_trip

    def shifted(self, ranks: Sequence[int], shift: int, size: int) -> list[Sample]:
        """Send from every rank to the rank `shift` places on in its own `ranks`, in the whole group together."""
        place = ranks.index(self.rank)
        to, source = ranks[(place + shift) % len(ranks)], ranks[place - shift]
        seconds = self._timed(lambda: self._swap([(to, size)], [(source, size)]))
        return gather_objects(self.group, Sample(self.rank, to, size / seconds / GIB))

    def all_to_all(self, ranks: Sequence[int], size: int) -> list[Sample]:
        """Send from every rank to all others of `ranks` together; return the total rate of each rank."""
        others = [(rank, size) for rank in ranks if rank != self.rank]
        seconds = gather_objects(self.group, self._timed(lambda: self._swap(others, others)))
        return [Sample(rank, rank, len(others) * size / seconds[rank] / GIB) for rank in range(self.n)]

    def _swap(self, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]]) -> None:
        """Exchange messages, given as (rank, bytes), all in flight together, and wait for them."""
        op = partial(dist.P2POp, group=self.group)
        ops = [op(dist.isend, self._send_buffer[:size], self._peers[rank]) for rank, size in sends]
        ops += [op(dist.irecv, self._recv_buffer(rank, size), self._peers[rank]) for rank, size in receives]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def _recv_buffer(self, rank: int, size: int) -> Tensor:
        if rank not in self._recv_buffers or self._recv_buffers[rank].numel() < size:
            self._recv_buffers[rank] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._recv_buffers[rank][:size]

    def _timed(self, exchange: Callable[[], None]) -> float:
        """Return the median seconds of `exchange`, from all ranks being ready until this one is done."""
        seconds = []
        for _ in range(self.repeats + 1):
            dist.barrier(self.group)
            synchronize(self.device)
            start = time.perf_counter()
            exchange()
            synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        return sorted(seconds[1:])[self.repeats // 2]  # the first one warms up


def probe_pairs(nodes: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs to measure alone: all of the first node, and its first rank with one rank of every other node.

    At most 64 of each sort, evenly picked, so that large groups are measured in seconds.
    """
    first = nodes[0]
    inside = [(a, b) for i, a in enumerate(first) for b in first[i + 1 :]]
    across = [(first[0], node[0]) for node in nodes[1:]]
    return tuple(pair for pairs in (inside, across) for pair in pairs[:: max(1, -(-len(pairs) // 64))])


def to_cluster(measured: LinkMeasurements, name: str = "measured", device: Device | None = None) -> Cluster:
    """Return the description that fits the measurements best.

    Within a node: a mesh if a rank that sends to all others together reaches most of the sum of its links' single
    rates, otherwise a switch. Between nodes: as many NICs as the ranks of a node together are faster than one of them
    alone (rounded to a number that ranks share evenly). Refuse what `LinkMeasurements.nodes` refuses.
    """
    nodes = measured.nodes()
    m = len(nodes[0])
    return Cluster(
        name=name,
        nodes=len(nodes),
        ranks_per_node=m,
        intra=_intra(measured, m) if m > 1 else None,
        network=_network(measured, m) if len(nodes) > 1 else None,
        device=device or Device(),
    )


def _intra(measured: LinkMeasurements, m: int) -> Intra:
    alone, together, latency = _medians(measured, m, within=True)
    to_all = _median(s.gibps for s in measured.inside)
    if m == 2:  # one link in each direction: a mesh and a switch measure the same
        return Mesh(together, latency)
    if to_all >= _MESH_SHARE * (m - 1) * together:
        return Mesh(to_all / (m - 1), latency)
    total = max(to_all, together)
    return Switch(total, total, min(alone, together) if together < total else None, latency)


def _network(measured: LinkMeasurements, m: int) -> Network:
    alone, together, latency = _medians(measured, m, within=False)
    per_node = m * together
    divisors = [k for k in range(1, m + 1) if m % k == 0]
    nics = min(divisors, key=lambda k: abs(k - per_node / alone))
    return Network(nics, per_node / nics, latency)


def _medians(measured: LinkMeasurements, m: int, within: bool) -> tuple[float, float, float]:
    """Return the rates alone and together, and the latency, of links within nodes or between them."""
    alone, rounds = (
        [s for s in samples if (s.source // m == s.destination // m) is within]
        for samples in (measured.alone, measured.rounds)
    )
    return _median(s.gibps for s in alone), _median(s.gibps for s in rounds), _median(s.latency_s for s in alone)


def _median(values: Iterable[float]) -> float:
    return max(median(values), _SMALLEST)
