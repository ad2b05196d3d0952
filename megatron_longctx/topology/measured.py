"""Measured links as data, and the cluster description that fits them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from .cluster import Cluster, Device, Intra, Mesh, Network, Switch

_MESH_SHARE = 0.6  # a mesh delivers at least this share of all its links together; a switch about 1 / (ranks - 1)
_SMALLEST = 1e-6  # GiB/s; keeps a description valid where a clock could not resolve a transfer


class Sample(NamedTuple):
    """One measured rate: `gibps` from `source` to `destination` under a load that the list it is in names."""

    source: int
    destination: int
    gibps: float


class Ping(NamedTuple):
    """One-way latency of small messages between two ranks."""

    source: int
    destination: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What `measure.measure_links` found.

    hosts: name of every rank's node.
    sizes: bytes of the messages, small to large: the first gives latencies, the last rates.
    pings, alone: pairs measured with all other ranks silent.
    rounds: all ranks at once, each sending to one rank and receiving from one: the k-th next of its node, for each k,
        or its counterpart in the k-th next node.
    inside: every rank sends to all ranks of its node at once; what each gets out in all (destination: itself).
    """

    hosts: tuple[str, ...]
    sizes: tuple[int, ...]
    pings: tuple[Ping, ...]
    alone: tuple[Sample, ...]
    rounds: tuple[Sample, ...]
    inside: tuple[Sample, ...]

    @property
    def n(self) -> int:
        return len(self.hosts)

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of every node, nodes in the order of their first rank.

        Raises:
            ValueError: nodes of different sizes, or ranks not numbered node by node.
        """
        groups: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            groups.setdefault(host, []).append(rank)
        nodes = tuple(map(tuple, groups.values()))
        if len(set(map(len, nodes))) != 1 or [rank for node in nodes for rank in node] != list(range(self.n)):
            raise ValueError(
                f"hosts {', '.join(self.hosts)}: expected equally many ranks on each, numbered node by node. "
                f"Start the same number of ranks on every host, in order."
            )
        return nodes


def to_cluster(measured: Measured, name: str = "measured", device: Device | None = None) -> Cluster:
    """The description that fits the measurements best.

    Within a node: a mesh if a rank that sends to all others at once gets out most of what its links carry one by one, a
    switch otherwise. Between nodes: as many NICs as the ranks of a node together are faster than one of them alone
    (rounded to a number that ranks share evenly).

    Raises:
        ValueError: see `Measured.nodes`.
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


def _intra(measured: Measured, m: int) -> Intra:
    alone = _middle(s.gibps for s in measured.alone if _same_node(s, m))
    together = _middle(s.gibps for s in measured.rounds if _same_node(s, m))
    everyone = _middle(s.gibps for s in measured.inside)
    latency = _middle(p.seconds for p in measured.pings if _same_node(p, m))
    if m == 2:  # one link each way: nothing tells a mesh from a switch
        return Mesh(together, latency)
    if everyone >= _MESH_SHARE * (m - 1) * together:
        return Mesh(everyone / (m - 1), latency)
    total = max(everyone, together)
    return Switch(total, total, min(alone, together) if together < total else None, latency)


def _network(measured: Measured, m: int) -> Network:
    alone = _middle(s.gibps for s in measured.alone if not _same_node(s, m))
    per_node = m * _middle(s.gibps for s in measured.rounds if not _same_node(s, m))
    divisors = [k for k in range(1, m + 1) if m % k == 0]
    nics = min(divisors, key=lambda k: abs(k - per_node / alone))
    latency = _middle(p.seconds for p in measured.pings if not _same_node(p, m))
    return Network(nics, per_node / nics, latency)


def _same_node(link: Sample | Ping, m: int) -> bool:
    return link.source // m == link.destination // m


def _middle(values: Iterable[float]) -> float:
    return max(median(values), _SMALLEST)


def probe_pairs(nodes: Sequence[Sequence[int]], most: int = 64) -> tuple[tuple[int, int], ...]:
    """Pairs worth measuring alone: all of the first node, and its first rank with one rank of every other node.

    No more than `most` of each sort, evenly picked, so that large groups are measured in seconds.
    """
    first = nodes[0]
    inside = [(a, b) for i, a in enumerate(first) for b in first[i + 1 :]]
    across = [(first[0], node[0]) for node in nodes[1:]]
    return tuple(pair for pairs in (inside, across) for pair in pairs[:: max(1, -(-len(pairs) // most))])
