"""A cluster as data: nodes of ranks, the links within and between them, and the resources that a message occupies.

Ranks are numbered node by node: rank r is rank `r % ranks_per_node` of node `r // ranks_per_node`. All nodes are equal,
and so are all links of a kind. Rates are GiB/s in one direction, latencies seconds per message.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args, get_type_hints

from ..core.errors import nearest, refuse
from .bounds import TYPE_NAMES, has_type
from .files import bundled, read_yaml

GIB = 2**30
_MAX = 10**6  # GiB, GiB/s, TFLOP/s, seconds, nodes: more than any cluster has


class Resource(NamedTuple):
    """A resource that transfers share: `egress`/`ingress` of rank `owner`, the `link` from rank `owner` to rank
    `other`, or `nic_out`/`nic_in` number `other` of node `owner`."""

    kind: str
    owner: int
    other: int = -1

    def __str__(self) -> str:
        return f"{self.kind} {self.owner}" + (f".{self.other}" if self.other >= 0 else "")


class Route(NamedTuple):
    """The resources that a message occupies, its rate if it has them to itself, and its latency."""

    resources: tuple[Resource, ...]
    gibps: float
    latency_s: float


Messages = tuple[tuple[float, int, float], ...]
"""Measured exchanges of a node: bytes that every rank sends to each of its next ranks, the number of these ranks, and
the seconds, with all that starting and awaiting the messages takes."""


class _Hardware:
    """A dataclass that refuses figures that no hardware has."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            what, most = ("a share of the peak", 1) if name.endswith("efficiency") else ("a number", _MAX)
            least = "from 0 on" if name == "latency_s" else "above 0"
            if isinstance(value, int | float) and not (0 <= value <= most and (value or least == "from 0 on")):
                remedy = f"Give {name} as measured or from the data sheet."
                raise refuse(name, value, f"{what} {least} and at most {most:,}", remedy)


@dataclass(frozen=True)
class Mesh(_Hardware):
    """A node in which every ordered pair of ranks has a separate link of `pair_gibps`."""

    pair_gibps: float
    latency_s: float = 0.0
    messages: Messages = ()  # by which messages are timed, instead of by rates
    kind: ClassVar[str] = "mesh"

    @cached_property
    def rates(self) -> dict[str, float]:
        """The GiB/s of the resources that a message occupies, keyed by their kind."""
        return {"link": self.pair_gibps}


@dataclass(frozen=True)
class Switch(_Hardware):
    """A node whose ranks share one non-blocking switch: each sends `egress_gibps` and receives `ingress_gibps` in all.

    `pair_gibps` limits each pair of ranks; None for no limit. A limit below the egress means that a rank must send to
    several others at the same time to use its link, as with NCCL's send/recv, whose channels per peer are limited.
    """

    egress_gibps: float
    ingress_gibps: float
    pair_gibps: float | None = None
    latency_s: float = 0.0
    messages: Messages = ()  # as in `Mesh`
    kind: ClassVar[str] = "switch"

    @cached_property
    def rates(self) -> dict[str, float]:
        """The GiB/s of the resources that a message occupies, keyed by their kind."""
        link = {} if self.pair_gibps is None else {"link": self.pair_gibps}
        return {"egress": self.egress_gibps, "ingress": self.ingress_gibps, **link}


@dataclass(frozen=True)
class Network(_Hardware):
    """A non-blocking network between nodes that have `nics` NICs each, with `nic_gibps` in each direction.

    Neighbouring ranks share a NIC if there are fewer NICs than ranks; a rank with several NICs uses them as one.
    """

    nics: int
    nic_gibps: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Fp8(_Hardware):
    """The TFLOP/s of layers outside of attention, by recipe of `train.fp8`, with all that is not a product in FP8."""

    delayed: float | None = None
    tensorwise: float | None = None
    blockwise: float | None = None
    mxfp8: float | None = None


@dataclass(frozen=True)
class Device(_Hardware):
    """The processor of one rank.

    `efficiency` is the share of `peak_tflops`, of bf16, that an attention kernel reaches; `layer_efficiency` the share
    that a layer reaches outside of attention, norms and activations included (None: `efficiency`); `memory_gibps` the
    rate at which elementwise kernels read and write memory.
    """

    name: str = ""
    peak_tflops: float | None = None
    efficiency: float | None = None
    layer_efficiency: float | None = None
    fp8: Fp8 = Fp8()
    memory_gib: float | None = None
    memory_gibps: float | None = None

    def layer_tflops(self, fp8: str) -> float | None:
        """The TFLOP/s of a layer outside of attention with `train.fp8`, or None if a figure is unknown."""
        if fp8 != "none":
            return getattr(self.fp8, fp8)  # type: ignore[no-any-return]
        share = self.layer_efficiency or self.efficiency
        return None if self.peak_tflops is None or share is None else self.peak_tflops * share

    @property
    def kernel_tflops(self) -> float | None:
        """The TFLOP/s that an attention kernel reaches, or None if a figure is unknown."""
        return None if self.peak_tflops is None or self.efficiency is None else self.peak_tflops * self.efficiency


Intra = Mesh | Switch


@dataclass(frozen=True)
class Cluster(_Hardware):
    """`nodes` nodes of `ranks_per_node` ranks. Several ranks per node need `intra`, several nodes need `network`."""

    name: str
    nodes: int
    ranks_per_node: int
    intra: Intra | None = None
    network: Network | None = None
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        super().__post_init__()
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
        """The number of ranks of the whole cluster."""
        return self.nodes * self.ranks_per_node

    @property
    def network_is_slower(self) -> bool:
        """Whether a rank's share of its node's NICs is slower than its links within its node. False for one node."""
        if self.network is None or not self.nodes > 1 < self.ranks_per_node:
            return False
        return self.route(0, 1).gibps > self.network.nic_gibps * self.network.nics / self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def nic_of(self, rank: int) -> int:
        """Return the number of the NIC in its node that a rank uses; of its group of NICs if it has several."""
        assert self.network is not None
        shares = min(self.network.nics, self.ranks_per_node)
        return rank % self.ranks_per_node * shares // self.ranks_per_node

    def ports(self, rank: int) -> tuple[Resource, Resource]:
        """Return the resources of a rank's messages to other nodes and of those from other nodes."""
        nic = self.node_of(rank), self.nic_of(rank)
        return Resource("nic_out", *nic), Resource("nic_in", *nic)

    def route(self, source: int, destination: int) -> Route:
        """Return the route of a message between two ranks. Refuse one to itself, and ranks that the cluster has not."""
        for rank in (source, destination):
            if not 0 <= rank < self.n:
                raise refuse("rank", rank, f"0..{self.n - 1}, the ranks of {self.name}", "Use a larger cluster.")
        if source == destination:
            raise refuse("destination", destination, "a rank other than the source", "Move nothing to oneself.")
        if self.node_of(source) == self.node_of(destination):
            assert self.intra is not None
            owners = {"egress": (source,), "ingress": (destination,), "link": (source, destination)}
            used = tuple(Resource(kind, *owners[kind]) for kind in self.intra.rates)
            return Route(used, min(self.intra.rates.values()), self.intra.latency_s)
        assert self.network is not None
        return Route((self.ports(source)[0], self.ports(destination)[1]), self._nic_gibps(), self.network.latency_s)

    def capacity(self, resource: Resource) -> float:
        """Return the GiB/s of a resource in its one direction. All resources of a kind are equal."""
        if resource.kind in ("nic_out", "nic_in"):
            return self._nic_gibps()
        assert self.intra is not None
        return self.intra.rates[resource.kind]

    def _nic_gibps(self) -> float:
        """Return the rate of one NIC, or of the NICs that one rank has to itself."""
        assert self.network is not None
        return self.network.nic_gibps * max(1, self.network.nics // self.ranks_per_node)

    def resized(self, n: int) -> Cluster:
        """Return the same hardware with `n` ranks: a part of a node, or as many whole nodes as needed.

        Refuse other numbers, and several nodes of a cluster whose network is not described.
        """
        m = self.ranks_per_node
        if n < 1 or (n > m and n % m):
            legal = f"1..{m} or a multiple of {m}"
            remedy = f"Nearest: {nearest(n, m) if n > 0 else 1}."
            raise refuse("ranks", n, f"{legal}, the ranks of whole nodes of {self.name}", remedy)
        if n <= m:  # the NICs of the other ranks are idle, so the description of the network does not apply
            return replace(self, nodes=1, ranks_per_node=n, network=self.network if n == m else None)
        return replace(self, nodes=n // m)


def load_cluster(source: str | Path) -> Cluster:
    """Load a cluster from a .yaml file, or by a name in `recipes/cluster` such as `h200_x8`. Refuse other content."""
    path, folder = Path(source), bundled("recipes") / "cluster"
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    if str(source) in names:
        path = folder / f"{source}.yaml"
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        remedy = "Write or measure one, or choose one that exists."
        raise refuse("parallelism.cluster", source, f"a .yaml file or one of {', '.join(names)}", remedy)
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
    """Write `cluster` as YAML; `load_cluster` reads an equal cluster."""
    from omegaconf import OmegaConf

    path.write_text(OmegaConf.to_yaml(OmegaConf.create(as_data(cluster))))


def as_data(cluster: Cluster) -> dict[str, Any]:
    """Convert a cluster to plain mappings and values."""
    data = {name: value for name, value in asdict(cluster).items() if value is not None}
    if cluster.intra is not None:
        given = {name: value for name, value in data["intra"].items() if value != ()}
        data["intra"] = {"kind": cluster.intra.kind, **given}
    return data


def cluster_from(data: Any) -> Cluster:
    """Return the cluster of `as_data` or a YAML file. Refuse unknown or missing keys, and wrong types or values."""
    return Cluster(**_values(Cluster, data, ""))


def _intra(data: Any) -> Intra:
    kinds: dict[str, type[Intra]] = {cls.kind: cls for cls in (Mesh, Switch)}
    given = _mapping(data, "intra")
    kind = given.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise refuse("intra.kind", kind, " or ".join(kinds), "Say how the ranks of a node are wired.")
    given = _values(kinds[kind], given, "intra.")
    return kinds[kind](**given | {"messages": _messages(given.get("messages", ()))})


def _messages(given: Any) -> Messages:
    def is_row(row: Any) -> bool:
        numbers = isinstance(row, list | tuple) and all(type(each) in (int, float) and each > 0 for each in row)
        return numbers and len(row) == 3 and row[1] % 1 == 0

    if not isinstance(given, list | tuple) or not all(map(is_row, given)):
        expected = "rows [bytes to each of the next ranks, number of these ranks, seconds]"
        raise refuse("intra.messages", given, expected, "Give them as measured, or leave them out.")
    return tuple((size, int(peers), seconds) for size, peers, seconds in given)


def _mapping(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        given = "a list" if isinstance(data, list) else data
        raise refuse(where.rstrip(".") or "cluster", given, "keys with values", "Indent the keys below it.")
    return {str(key): value for key, value in data.items()}


_PARTS: dict[str, Any] = {"intra": None, "network": Network, "device": Device, "fp8": Fp8}


def _values(cls: type, data: Any, where: str) -> dict[str, Any]:
    """Return `data`, checked against the names and types of the fields of `cls`, with its parts as objects."""
    given = {key: value for key, value in _mapping(data, where).items() if value is not None or key not in _PARTS}
    known, hints = {item.name: item for item in fields(cls)}, get_type_hints(cls)
    for key, value in given.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"Did you mean {where}{near[0]}?" if near else "Remove it."
            raise refuse(f"{where}{key}", value, "one of the keys " + ", ".join(known), hint)
        kind, nullable = (*get_args(hints[key]), hints[key])[0], type(None) in get_args(hints[key])
        if kind in TYPE_NAMES and not has_type(value, kind) and not (nullable and value is None):
            raise refuse(f"{where}{key}", value, TYPE_NAMES[kind] + " or null" * nullable, "Correct the file.")
        if key in _PARTS:
            part = _PARTS[key]
            given[key] = part(**_values(part, value, f"{where}{key}.")) if part else _intra(value)
    for name, item in known.items():
        if name not in given and item.default is MISSING and item.default_factory is MISSING:
            raise refuse(f"{where}{name}", "missing", "a value", f"Add {where}{name}.")
    return given
