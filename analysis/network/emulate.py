"""Emulated hosts, which are network namespaces, and links, which are veth pairs limited by `htb` (Linux, iproute2).

`run` re-runs this module in separate user, network, mount and process namespaces. There it may create hosts and links
without affecting the machine's network, and everything disappears with it, however it ends.
"""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from megatron_longctx.config.cluster import Cluster, Mesh, Network

from .job import Job, Outcome

ROOT = Path(__file__).resolve().parents[2]
_ISOLATED = (
    *("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid"),
    *("--fork", "--kill-child", "--mount-proc"),
)
_FRAMING = 1514 / 1448  # bytes of a full packet on the link per byte that a program sends over TCP


def run(job: Job, timeout: float = 1200.0) -> Outcome:
    """Measure `job` on an emulated network; progress goes to standard error.

    Raises:
        PermissionError: this machine cannot emulate a network, with the reason.
        RuntimeError: a rank failed, with the end of its output.
        TimeoutError: the job did not end in time.
    """
    reason = reason_not_possible()
    if reason is not None:
        raise PermissionError(f"a limited network cannot be emulated here: {reason}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job.save(folder / "job")
        inner = [sys.executable, "-m", "analysis.network.emulate", name]
        command = [*_ISOLATED, "sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh", *inner]
        # Addresses here have no names, of which torch would warn.
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        try:
            # No process outlives this one: the process namespace ends with its first process.
            done = subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet, **path}, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{job.cluster.name}: not done within {timeout:.0f} s") from None
        if done.returncode:
            logs = {log.stem: log.read_text().strip() for log in sorted(folder.glob("*.log"))}
            ends = "\n".join(f"{name}: …{text[-1500:]}" for name, text in logs.items() if text)
            raise RuntimeError(f"{job.cluster.name}: a rank failed.\n{ends}")
        outcome = pickle.loads((folder / "outcome").read_bytes())
        assert isinstance(outcome, Outcome)
        return outcome


def main() -> int:
    """Build the network and start a worker per rank, inside the namespaces. The first worker that fails ends all."""
    folder = Path(sys.argv[1])
    cluster = Job.load(folder / "job").cluster
    build(cluster)
    workers = []
    for rank in range(cluster.n):
        command = ["ip", "netns", "exec", namespace(rank)]
        command += [sys.executable, "-m", "analysis.network.worker", str(folder), str(rank)]
        log = (folder / f"rank{rank}.log").open("w")
        # Rank 0 prints the progress; errors of all ranks go into their logs.
        workers.append(subprocess.Popen(command, stdout=sys.stderr if rank == 0 else log, stderr=log))
    while any(worker.poll() is None for worker in workers):
        if any(worker.poll() for worker in workers):
            break  # the others end with this process
        time.sleep(0.1)
    return int(any(worker.poll() for worker in workers))  # the code of a signal is negative


def address(rank: int) -> str:
    return f"10.78.0.{rank + 1}"


def namespace(rank: int) -> str:
    return f"rank{rank}"


def reason_not_possible() -> str | None:
    """Return why this machine cannot emulate a network; None if it can."""
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"the program {tool} is missing (package util-linux or iproute2)"
    steps = ("mount -t tmpfs tmpfs /run", "ip netns add a", "ip -n a link add x type veth peer name y")
    trial = " && ".join((*steps, *(f"tc -n a {line}" for line in _limits("x", 1.0))))
    done = subprocess.run([*_ISOLATED, "sh", "-c", trial], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"the kernel or its settings do not permit it ({done.stderr.strip()})"
    return None


def _limits(device: str, gibps: float) -> list[str]:
    """Return `tc` commands that limit a device's rate.

    Acknowledgements (packets below 64 bytes) go first. In one queue with data they would halve the other direction.
    """
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
    """Commands with their namespaces. They run in batches: starting a program for each would take longer."""

    links: list[tuple[str, str]] = field(default_factory=list)
    ip: list[tuple[str, str]] = field(default_factory=list)
    tc: list[tuple[str, str]] = field(default_factory=list)

    def link(self, a: str, at_a: str, b: str, at_b: str, gibps: float | None) -> None:
        """Add a veth pair between interface `at_a` of namespace `a` and `at_b` of `b`, limited in both directions."""
        self.links.append((a, f"link add {at_a} type veth peer name {at_b} netns {b}"))
        for where, device in ((a, at_a), (b, at_b)):
            self.ip.append((where, f"link set {device} up"))
            if gibps is not None:
                self.tc += [(where, line) for line in _limits(device, gibps)]

    def route(self, where: str, to: str, device: str, via: str = "") -> None:
        gateway = f"via {via} onlink" if via else ""
        self.ip.append((where, f"route add {to} {gateway} dev {device} quickack 1"))

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
    """Create the hosts and links of `cluster`, with one namespace per rank.

    Inside a node, every pair of ranks has a link. Between nodes, every NIC is connected to one central router; ranks
    that share a NIC are connected through a router of their node.

    Raises:
        ValueError: links of a kind that cannot be emulated.
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
    # Connections keep their rate while idle, as clusters are configured to. A send is done when most of it has left, as
    # with RDMA: little is buffered. Otherwise later steps' messages take rate from one that is still in flight.
    fixed = {"tcp_slow_start_after_idle": "0", "tcp_wmem": "4096 16384 65536"}
    for name in (*names, *routers):
        for key, value in {**fixed, "ip_forward": str(int(name in routers))}.items():
            _run(["ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{key}"])
    batch.run()


def _connect_nodes(batch: _Batch, cluster: Cluster, names: list[str]) -> list[str]:
    """Add links and routes between nodes; return the namespaces of the routers."""
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


if __name__ == "__main__":
    sys.exit(main())
