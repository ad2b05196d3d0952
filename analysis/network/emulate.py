"""Hosts as network namespaces, links as veth pairs that `htb` holds to a rate. Linux, iproute2.

`isolated` re-runs a command in user, network, mount and process namespaces of its own, where it may do all this
without touching the machine's network, and with which everything disappears, however it ends.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_longctx.topology import Cluster, Mesh, Network

_ISOLATED = [
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
_FRAMING = 1514 / 1448  # bytes of a full packet on the link for each byte that a program sends over TCP


def address(rank: int) -> str:
    return f"10.78.0.{rank + 1}"


def namespace(rank: int) -> str:
    return f"rank{rank}"


def reason_not_possible() -> str | None:
    """Why this machine cannot emulate a network; None where it can."""
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"the program {tool} is missing (package util-linux or iproute2)"
    steps = ("mount -t tmpfs tmpfs /run", "ip netns add a", "ip -n a link add x type veth peer name y")
    trial = " && ".join((*steps, *(f"tc -n a {line}" for line in _limited("x", 1.0))))
    done = subprocess.run([*_ISOLATED, "sh", "-c", trial], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"the kernel or its settings do not permit it ({done.stderr.strip()})"
    return None


def isolated(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` where `build` may be called."""
    return [*_ISOLATED, "sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh", *command]


def _limited(device: str, gibps: float) -> list[str]:
    """Commands for `tc`. Acknowledgements (packets below 64 bytes) go first: in a queue with the data of the other
    direction they would halve it."""
    rate = round(gibps * 2**30 * 8 * _FRAMING)
    share = f"htb rate {{}}bit ceil {rate}bit burst 32kb cburst 32kb quantum 60000"
    return [
        f"qdisc add dev {device} root handle 1: htb default 20",
        f"class add dev {device} parent 1: classid 1:1 {share.format(rate)}",
        f"class add dev {device} parent 1:1 classid 1:10 {share.format(rate // 10)} prio 0",
        f"class add dev {device} parent 1:1 classid 1:20 {share.format(rate - rate // 10)} prio 1",
        f"filter add dev {device} parent 1: protocol ip u32 match u16 0 0xffc0 at 2 flowid 1:10",
    ]


@dataclass
class _Batch:
    """Commands by namespace, run in batches: a program start for each would take most of the time."""

    links: list[tuple[str, str]] = field(default_factory=list)
    ip: list[tuple[str, str]] = field(default_factory=list)
    tc: list[tuple[str, str]] = field(default_factory=list)

    def link(self, a: str, at_a: str, b: str, at_b: str, gibps: float | None) -> None:
        """A veth pair between interface `at_a` of namespace `a` and `at_b` of `b`, limited in both directions."""
        self.links.append((a, f"link add {at_a} type veth peer name {at_b} netns {b}"))
        for where, device in ((a, at_a), (b, at_b)):
            self.ip.append((where, f"link set {device} up"))
            if gibps is not None:
                self.tc += [(where, line) for line in _limited(device, gibps)]

    def route(self, where: str, to: str, device: str, via: str = "") -> None:
        self.ip.append((where, f"route add {to} {f'via {via} ' if via else ''}dev {device}" + " onlink" * bool(via)))

    def run(self) -> None:
        for program, lines in (("ip", self.links), ("ip", self.ip), ("tc", self.tc)):
            for where in dict.fromkeys(name for name, _ in lines):
                text = "\n".join(line for name, line in lines if name == where)
                _run([program, "-n", where, "-batch", "-"], text)


def _run(command: list[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}\n{text}")


def build(cluster: Cluster) -> None:
    """Make hosts and links as `cluster` describes them: one namespace a rank, named by `namespace`.

    Links inside a node: one for each pair of ranks. Between nodes: every NIC hangs on one router in the middle; ranks
    that share a NIC do so through a router of their node.

    Raises:
        ValueError: links of a kind that this does not build.
        RuntimeError: a command failed.
    """
    if cluster.ranks_per_node > 1 and not isinstance(cluster.intra, Mesh):
        raise ValueError(f"{cluster.name}: expected a mesh inside each node. Only that is emulated.")
    batch = _Batch()
    names = [namespace(rank) for rank in range(cluster.n)]
    for rank, name in enumerate(names):
        for line in ("link set lo up", "addr del 127.0.0.1/8 dev lo", f"addr add {address(rank)}/32 dev lo"):
            batch.ip.append((name, line))
    for a in range(cluster.n):
        for b in range(a + 1, cluster.n):
            if cluster.node_of(a) == cluster.node_of(b):
                assert isinstance(cluster.intra, Mesh)
                batch.link(names[a], f"to{b}", names[b], f"to{a}", cluster.intra.pair_gibps)
                batch.route(names[a], address(b), f"to{b}")
                batch.route(names[b], address(a), f"to{a}")
    routers = _connect_nodes(batch, cluster, names) if cluster.nodes > 1 else []
    for name in (*names, *routers):
        _run(["ip", "netns", "add", name])
    for name in (*names, *routers):  # hosts keep a connection's rate while it is idle, as clusters are set to
        for key, value in (("ip_forward", name in routers), ("tcp_slow_start_after_idle", False)):
            _run(["ip", "netns", "exec", name, "sh", "-c", f"echo {int(value)} > /proc/sys/net/ipv4/{key}"])
    batch.run()


def _connect_nodes(batch: _Batch, cluster: Cluster, names: list[str]) -> list[str]:
    """Links and routes between nodes; returns the routers' namespaces."""
    network = cluster.network
    assert isinstance(network, Network)
    shares = min(network.nics, cluster.ranks_per_node)
    rate = network.nic_gibps * max(1, network.nics // cluster.ranks_per_node)
    routers = ["core"]
    for line in ("link set lo up", f"addr add {address(252)}/32 dev lo"):
        batch.ip.append(("core", line))
    for node in range(cluster.nodes):
        for nic in range(shares):
            ranks = [r for r in range(cluster.n) if cluster.node_of(r) == node and cluster.nic_of(r) == nic]
            port = f"n{node}x{nic}"
            if len(ranks) == 1:
                batch.link(names[ranks[0]], "out", "core", port, rate)
                batch.route("core", address(ranks[0]), port)
                batch.route(names[ranks[0]], "default", "out", address(252))
                continue
            routers.append(port)
            batch.link(port, "uplink", "core", port, rate)
            batch.ip.append((port, f"addr add {address(253)}/32 dev lo"))
            batch.route(port, "default", "uplink", address(252))
            for rank in ranks:
                batch.link(names[rank], "out", port, f"r{rank}", None)
                batch.route(names[rank], "default", "out", address(253))
                batch.route(port, address(rank), f"r{rank}")
                batch.route("core", address(rank), port, address(253))
    return routers
