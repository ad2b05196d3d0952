"""A cluster as data: nodes of ranks, the links within and between them, and what one message occupies on its way.

Ranks are numbered node by node: rank r is rank `r % ranks_per_node` of node `r // ranks_per_node`. All nodes are alike,
and so are all links of a kind. Rates are GiB/s in one direction, latencies seconds per message.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from omegaconf import OmegaConf

from ..errors import refuse
from ..files import bundled, read_yaml

GIB = 2**30
_MOST = 10**6  # GiB, GiB/s, TFLOP/s, seconds, nodes: what no cluster comes to


class Resource(NamedTuple):
    """Something that transfers share: `egress`/`ingress` of rank `owner`, the `link` from rank `owner` to rank `other`,
    `nic_out`/`nic_in` number `other` of node `owner`."""

    kind: str
    owner: int
    other: int = -1

    def __str__(self) -> str:
        return f"{self.kind} {self.owner}" + (f".{self.other}" if self.other >= 0 else "")


class Route(NamedTuple):
    """What a message occupies on its way, the rate it gets when it is alone there, and its latency."""

    resources: tuple[Resource, ...]
    gibps: float
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """Time of one message that has the route to itself."""
        return self.latency_s + num_bytes / (self.gibps * GIB)


def _positive(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not 0 < value <= _MOST:
            remedy = f"Give {name} as measured or from the data sheet."
            raise refuse(name, value, f"a number above 0 and at most {_MOST:,}", remedy)


def _latency(value: float) -> None:
    if not 0 <= value <= _MOST:
        raise refuse(
            "latency_s", value, f"0 or more and at most {_MOST:,}", "Give the seconds that one small message takes."
        )


@dataclass(frozen=True)
class Mesh:
    """Every ordered pair of a node's ranks has a link of its own, of `pair_gibps`."""

    pair_gibps: float
    latency_s: float = 0.0
    kind: ClassVar[str] = "mesh"

    def __post_init__(self) -> None:
        _positive(self, "pair_gibps")
        _latency(self.latency_s)

    def resources(self, source: int, destination: int) -> tuple[tuple[Resource, float], ...]:
        return ((Resource("link", source, destination), self.pair_gibps),)


@dataclass(frozen=True)
class Switch:
    """A node's ranks hang on one non-blocking switch: each sends `egress_gibps` and receives `ingress_gibps` in all.

    `pair_gibps`: the most that one pair gets of it (None: all of it). Less than the egress means that a rank must talk
    to several others at once to use its link, as with NCCL's send/recv, whose channels per peer are limited.
    """

    egress_gibps: float
    ingress_gibps: float
    pair_gibps: float | None = None
    latency_s: float = 0.0
    kind: ClassVar[str] = "switch"

    def __post_init__(self) -> None:
        _positive(self, "egress_gibps", "ingress_gibps", "pair_gibps")
        _latency(self.latency_s)

    def resources(self, source: int, destination: int) -> tuple[tuple[Resource, float], ...]:
        ends = (
            (Resource("egress", source), self.egress_gibps),
            (Resource("ingress", destination), self.ingress_gibps),
        )
        if self.pair_gibps is None:
            return ends
        return (*ends, (Resource("link", source, destination), self.pair_gibps))


@dataclass(frozen=True)
class Network:
    """Between nodes: `nics` per node, each `nic_gibps` in each direction, on a non-blocking network.

    Neighbouring ranks share a NIC where there are fewer NICs than ranks; a rank with several uses them as one.
    """

    nics: int
    nic_gibps: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _positive(self, "nics", "nic_gibps")
        _latency(self.latency_s)


@dataclass(frozen=True)
class Device:
    """One rank's processor. `efficiency` is the share of `peak_tflops` that an attention kernel reaches."""

    name: str = ""
    peak_tflops: float | None = None
    efficiency: float | None = None
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "peak_tflops", "efficiency", "memory_gib")
        if self.efficiency is not None and self.efficiency > 1:
            raise refuse("efficiency", self.efficiency, "a share of the peak, 1 at most", "Divide per cent by 100.")

    @property
    def kernel_tflops(self) -> float | None:
        """What an attention kernel reaches, where both figures are known."""
        return None if self.peak_tflops is None or self.efficiency is None else self.peak_tflops * self.efficiency


Intra = Mesh | Switch


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `ranks_per_node` ranks. Several ranks a node need `intra`, several nodes need `network`."""

    name: str
    nodes: int
    ranks_per_node: int
    intra: Intra | None = None
    network: Network | None = None
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise refuse(
                    name,
                    getattr(self, name),
                    f"1 or more and at most {_MOST:,}",
                    f"Count the {name.replace('_', ' ')}.",
                )
        if self.ranks_per_node > 1 and self.intra is None:
            raise refuse("intra", None, f"the links between {self.ranks_per_node} ranks of a node", "Add intra.")
        if self.nodes > 1 and self.network is None:
            raise refuse("network", None, f"the network between {self.nodes} nodes", "Add network.")
        if self.network is not None:
            few, many = sorted((self.network.nics, self.ranks_per_node))
            if many % few:
                expected = f"a divisor or a multiple of ranks_per_node={self.ranks_per_node}"
                raise refuse("nics", self.network.nics, expected, "Count only NICs that ranks share evenly.")

    @property
    def n(self) -> int:
        """Ranks of the whole cluster."""
        return self.nodes * self.ranks_per_node

    @property
    def network_share_gibps(self) -> float:
        """What a rank gets of its node's NICs while all of the node's ranks send, GiB/s."""
        assert self.network is not None
        return self.network.nic_gibps * self.network.nics / self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def nic_of(self, rank: int) -> int:
        """Which NIC of its node a rank uses: the number of the rank's share if it has several."""
        assert self.network is not None
        shares = min(self.network.nics, self.ranks_per_node)
        return rank % self.ranks_per_node * shares // self.ranks_per_node

    def ports(self, rank: int) -> tuple[Resource, Resource]:
        """What a rank's messages to other nodes go through, and those from them."""
        nic = self.node_of(rank), self.nic_of(rank)
        return Resource("nic_out", *nic), Resource("nic_in", *nic)

    def route(self, source: int, destination: int) -> Route:
        """What a message between two different ranks occupies, and how fast it is when alone.

        Raises:
            ValueError: a rank outside the cluster, or the same rank twice.
        """
        for rank in (source, destination):
            if not 0 <= rank < self.n:
                raise refuse("rank", rank, f"0..{self.n - 1}, the ranks of {self.name}", "Use a larger cluster.")
        if source == destination:
            raise refuse("destination", destination, "a rank other than the source", "Move nothing to oneself.")
        used, latency = self._links(source, destination)
        return Route(tuple(resource for resource, _ in used), min(rate for _, rate in used), latency)

    def capacity(self, resource: Resource) -> float:
        """GiB/s of a resource, in its one direction. All resources of a kind are alike."""
        if resource.kind in ("nic_out", "nic_in"):
            return self._nic_gibps()
        assert self.intra is not None
        return next(rate for found, rate in self.intra.resources(0, 1) if found.kind == resource.kind)

    def resized(self, n: int) -> Cluster:
        """The same hardware with `n` ranks: part of a node, or as many whole nodes as it takes.

        Raises:
            ValueError: neither, or several nodes of a cluster whose network is not described.
        """
        m = self.ranks_per_node
        if n < 1 or (n > m and n % m):
            legal = f"1..{m} or a multiple of {m}"
            nearest = f"{n // m * m} or {(n // m + 1) * m}" if n > 0 else "1"
            raise refuse("ranks", n, f"{legal}, the ranks of whole nodes of {self.name}", f"Nearest: {nearest}.")
        if n <= m:  # the other ranks' NICs lie idle, so the network says nothing here
            return replace(self, nodes=1, ranks_per_node=n, network=self.network if n == m else None)
        return replace(self, nodes=n // m)

    def _links(self, source: int, destination: int) -> tuple[tuple[tuple[Resource, float], ...], float]:
        a, b = self.node_of(source), self.node_of(destination)
        if a == b:
            assert self.intra is not None
            return self.intra.resources(source, destination), self.intra.latency_s
        assert self.network is not None
        rate = self._nic_gibps()
        return ((self.ports(source)[0], rate), (self.ports(destination)[1], rate)), self.network.latency_s

    def _nic_gibps(self) -> float:
        """Rate of one NIC, or of the share of NICs that one rank has to itself."""
        assert self.network is not None
        return self.network.nic_gibps * max(1, self.network.nics // self.ranks_per_node)


def load_cluster(source: str | Path, folder: Path | None = None) -> Cluster:
    """The cluster described in a YAML file, or the one of that name in `folder`.

    Args:
        source: the path of a .yaml file, or a bare name such as `h200_x8`.
        folder: where names are looked up; None for the `recipes/cluster` that comes with this package.

    Raises:
        ValueError: no such file, not YAML, an unknown or missing key, a value of the wrong type or range.
    """
    path = Path(source)
    folder = bundled("recipes") / "cluster" if folder is None else folder
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    if str(source) in names:
        path = folder / f"{source}.yaml"
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        known = f" or one of {', '.join(names)}" if names else ""
        raise refuse(
            "parallelism.cluster", source, f"a .yaml file{known}", "Write or measure one, or choose one that exists."
        )
    try:
        data = read_yaml(path)
    except Exception as error:  # the YAML parser and OmegaConf raise unrelated types
        what = str(error).strip().split("\n", 1)[0]
        raise ValueError(f"{path}: expected YAML that describes a cluster ({what}). Mend the file.") from None
    try:
        return cluster_from(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write `cluster` as YAML that `load_cluster` reads back equal."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(as_data(cluster))))


def as_data(cluster: Cluster) -> dict[str, Any]:
    """The cluster as plain mappings and values."""
    data: dict[str, Any] = {"name": cluster.name, "nodes": cluster.nodes, "ranks_per_node": cluster.ranks_per_node}
    if cluster.intra is not None:
        data["intra"] = {"kind": cluster.intra.kind, **asdict(cluster.intra)}
    if cluster.network is not None:
        data["network"] = asdict(cluster.network)
    data["device"] = asdict(cluster.device)
    return data


def cluster_from(data: Any) -> Cluster:
    """The cluster of `as_data`, or of a YAML file's content.

    Raises:
        ValueError: an unknown or missing key, a value of the wrong type or range.
    """
    values = _values(Cluster, data, "")
    if values.get("intra") is not None:
        intra = dict(_mapping(values["intra"], "intra"))
        kinds: dict[str, type[Intra]] = {cls.kind: cls for cls in (Mesh, Switch)}
        kind = intra.pop("kind", None)
        if not isinstance(kind, str) or kind not in kinds:
            raise refuse("intra.kind", kind, " or ".join(kinds), "Say how the ranks of a node are wired.")
        values["intra"] = kinds[kind](**_values(kinds[kind], intra, "intra."))
    if values.get("network") is not None:
        values["network"] = Network(**_values(Network, values["network"], "network."))
    device = values.pop("device", None)
    if device is not None:
        values["device"] = Device(**_values(Device, device, "device."))
    return Cluster(**values)


def _mapping(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise refuse(
            where.rstrip(".") or "cluster",
            "a list" if isinstance(data, list) else data,
            "keys with values",
            "Indent the keys below it.",
        )
    return {str(key): value for key, value in data.items()}


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, type(None)), "a number or null"),
    "str": ((str,), "text"),
}


def _values(cls: type, data: Any, where: str) -> dict[str, Any]:
    """The keys of `data`, each a field of `cls` and of its type. Fields that are dataclasses are left to the caller."""
    given = _mapping(data, where)
    known = {item.name: item for item in fields(cls)}
    for key, value in given.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"Did you mean {where}{near[0]}?" if near else "Remove it."
            raise refuse(f"{where}{key}", value, "one of the keys " + ", ".join(known), hint)
        types, expected = _TYPES.get(str(known[key].type), ((object,), ""))
        if not isinstance(value, types) or isinstance(value, bool):
            raise refuse(f"{where}{key}", value, expected, "Correct the file.")
    for name, item in known.items():
        if name not in given and item.default is MISSING and item.default_factory is MISSING:
            raise refuse(f"{where}{name}", "missing", "a value", f"Add {where}{name}.")
    return given
