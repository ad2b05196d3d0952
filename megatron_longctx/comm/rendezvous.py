"""How the ranks of a job meet: at a store that listens at one address, to form groups that all wait equally long.

torch's own rendezvous listens on every interface, and whoever connects may read and change all that ranks tell each
other there. `docs/security.md` says who is trusted with what.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from ..errors import refuse
from ..gpus import use_gpu

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Placement:
    """This process among the ranks.

    Attributes:
        ranks_here: that share the processors which this process may use.
        meeting: host and port that rank 0 listens at; None where torch's environment variables say how ranks meet.
        one_host: all ranks are on this host.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_here: int = 1
    meeting: tuple[str, int] | None = None
    one_host: bool = False

    @classmethod
    def local(cls, rank: int, world_size: int) -> Placement:
        """Of a rank that was started on this host with all others."""
        return cls(rank, world_size, rank, world_size, one_host=True)

    @classmethod
    def of_torchrun(cls, env: Mapping[str, str]) -> Placement | None:
        """As torchrun says in the environment of the ranks that it starts; None where it says nothing."""
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return None
        world, here = int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", "1"))
        return cls(int(env["RANK"]), world, int(env.get("LOCAL_RANK", "0")), here, one_host=here == world)

    @classmethod
    def of_environment(cls, env: Mapping[str, str]) -> Placement | None:
        """As torchrun says, or the environment of one of several tasks of a Slurm step; None where neither does.

        Raises:
            ValueError: a Slurm step without MASTER_ADDR and MASTER_PORT.
        """
        if (started := cls.of_torchrun(env)) is not None:
            return started
        if "SLURM_STEP_ID" not in env or int(env.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
            return None
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in env:
                raise ValueError(
                    f"{name} is not set: expected the first node and a free port. See launch/train.sbatch."
                )
        return cls(
            int(env["SLURM_PROCID"]),
            int(env["SLURM_STEP_NUM_TASKS"]),
            int(env["SLURM_LOCALID"]),
            _tasks_sharing(env),
            meeting=(env["MASTER_ADDR"], int(env["MASTER_PORT"])),
            one_host=env.get("SLURM_STEP_NUM_NODES", "1") == "1",
        )

    def enter(self, env: MutableMapping[str, str]) -> None:
        """Say in torch's variables which rank this is."""
        env.update(RANK=str(self.rank), WORLD_SIZE=str(self.world_size), LOCAL_RANK=str(self.local_rank))


def _tasks_sharing(env: Mapping[str, str]) -> int:
    """How many tasks share the processors that this one may use: one where Slurm has bound it to its own."""
    here = len(os.sched_getaffinity(0))
    return max(1, here // int(env.get("SLURM_CPUS_PER_TASK", here)))


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A socket for the store, at a free port by default: bound now, so that nobody else takes it meanwhile.

    Raises:
        OSError: it is not this host's address, or taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family)


def host_store(listener: socket.socket, timeout_s: float) -> TCPStore:
    """The store of a job, in this process. listener: becomes the store's own."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(port: int, timeout_s: float, host: str = LOOPBACK) -> TCPStore:
    """The store of a job that another process hosts."""
    limit = datetime.timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, timeout=limit)


def meet(place: Placement, timeout_s: float) -> Store | None:
    """The store at `place.meeting`, which rank 0 hosts; under torchrun its own; None where there is no such place.

    Raises:
        ValueError: other hosts cannot reach the address, or its port is taken.
        OSError: it is not rank 0's host's.
        RuntimeError: the others did not find it in time.
    """
    if place.meeting is None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        if attempt is None:
            return None
        # The store outlives the ranks: after a restart in place it still has what those before have told each other.
        store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
        return PrefixStore(f"attempt_{attempt}", store)
    host, port = place.meeting
    if place.rank:
        return join_store(port, timeout_s, host)
    try:
        listener = listen(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        remedy = "Set it to another; on Linux ports below 32768 are not handed out by themselves."
        raise refuse("MASTER_PORT", port, f"a port that nobody listens at on {host}", remedy) from None
    found = listener.getsockname()[0]
    if not place.one_host and ipaddress.ip_address(found).is_loopback:
        listener.close()
        expected = f"an address that other hosts reach; on the first it is {found}"
        raise refuse("MASTER_ADDR", host, expected, "Set it to that of an interface of the first host.")
    return host_store(listener, timeout_s)


def join(place: Placement, store: Store | None, timeout_s: float, cuda: bool) -> None:
    """Join the job's process group: NCCL on GPUs, gloo on CPUs. On one host, both listen on loopback alone, on several
    gloo listens on the interface that leads to the first one; both unless the environment names another interface.

    Args:
        store: where to meet; None for that of torch's environment variables.

    Raises:
        ValueError: no interface of this host that others reach is plain to see.
        RuntimeError: the other ranks did not come in time.
    """
    if place.one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        # By itself gloo takes the address of the host's own name. Where that is 127.0.1.1 the ranks would hang.
        meeting = place.meeting[0] if place.meeting else os.environ.get("MASTER_ADDR", "")
        os.environ["GLOO_SOCKET_IFNAME"] = interface_to(meeting)
    if cuda:
        use_gpu(place.local_rank)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.ranks_here))
    # Groups join lazily: binding them to a device here made eight ranks hang when they left (torch 2.11, NCCL 2.28).
    backend, limit = "nccl" if cuda else "gloo", datetime.timedelta(seconds=timeout_s)
    if store is None:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    if cuda:
        # Without a first message on the right device, NCCL guesses it from the rank when a barrier comes first.
        dist.all_reduce(torch.zeros(1, device="cuda"))


def timeout_of(group: dist.ProcessGroup | None = None) -> datetime.timedelta:
    """How long a collective of `group` may take, by default of all ranks. A new group has torch's default instead."""
    group = group or dist.group.WORLD
    assert group is not None
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    limit: datetime.timedelta = group._get_backend(device).options._timeout
    return limit


def interface_to(host: str) -> str:
    """The network interface by which this host reaches `host`, or is it: never loopback.

    Raises:
        ValueError: `host` is loopback here, and this host has none or several other interfaces that are up.
    """
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    with contextlib.suppress(OSError):  # a name that does not resolve, a network without a route
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            own = ipaddress.ip_address(probe.getsockname()[0])
        if not own.is_loopback:
            for name, addresses in interfaces.items():
                if any(str(own) == known.address.partition("%")[0] for known in addresses):
                    return name
    up = psutil.net_if_stats()
    others = [
        name
        for name, addresses in interfaces.items()
        if up[name].isup and any(a.family == socket.AF_INET and not a.address.startswith("127.") for a in addresses)
    ]
    if len(others) == 1:
        return others[0]
    expected = f"the interface of this host that the others reach, one of {', '.join(others) or 'none that is up'}"
    remedy = f"{host or 'MASTER_ADDR'} is this host's loopback here, which they do not reach: set GLOO_SOCKET_IFNAME."
    raise refuse("GLOO_SOCKET_IFNAME", "", expected, remedy)
