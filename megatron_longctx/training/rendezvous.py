"""How the ranks of a job find each other: a store that listens at one address, and process groups with one timeout.

torch's own rendezvous listens on every interface, and anyone who connects can read and change everything that ranks
exchange there. `docs/security.md` describes who is trusted.
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

from ..config.gpus import use_gpu
from ..core.errors import refuse

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process and where the job's ranks run."""

    rank: int
    world_size: int
    local_rank: int
    ranks_sharing_cpus: int = 1  # those that share this process's CPUs
    store_address: tuple[str, int] | None = None  # host and port of rank 0's store; None: torch's environment variables
    single_host: bool = False  # whether all ranks are on this host

    @classmethod
    def local(cls, rank: int, world_size: int) -> RankInfo:
        """Describe a rank that was started on this host with all others."""
        return cls(rank, world_size, rank, world_size, single_host=True)

    @classmethod
    def from_torchrun(cls, env: Mapping[str, str]) -> RankInfo | None:
        """Return what torchrun has set in the environment of its ranks; None without torchrun."""
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return None
        world, here = int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", "1"))
        return cls(int(env["RANK"]), world, int(env.get("LOCAL_RANK", "0")), here, single_host=here == world)

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> RankInfo | None:
        """Return what torchrun or a Slurm step of several tasks has set; None without either."""
        if (torchrun := cls.from_torchrun(env)) is not None:
            return torchrun
        if "SLURM_STEP_ID" not in env or int(env.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
            return None
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in env:
                raise refuse(name, "", "the first node and a free port", "See launch/train.sbatch.")
        if not env["MASTER_PORT"].isdecimal():
            raise refuse("MASTER_PORT", env["MASTER_PORT"], "a free port's number", "See launch/train.sbatch.")
        cpus = len(os.sched_getaffinity(0))  # if Slurm has not bound the task to its own, it shares the host's
        return cls(
            int(env["SLURM_PROCID"]),
            int(env["SLURM_STEP_NUM_TASKS"]),
            int(env["SLURM_LOCALID"]),
            max(1, cpus // int(env.get("SLURM_CPUS_PER_TASK", cpus))),
            store_address=(env["MASTER_ADDR"], int(env["MASTER_PORT"])),
            single_host=env.get("SLURM_STEP_NUM_NODES", "1") == "1",
        )

    def export(self, env: MutableMapping[str, str]) -> None:
        """Set torch's environment variables of this rank."""
        env.update(RANK=str(self.rank), WORLD_SIZE=str(self.world_size), LOCAL_RANK=str(self.local_rank))


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a listening socket for the store, by default at a free port. It is bound, so no other process can take it.

    Raises OSError: the address belongs to another host, or the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family)


def host_store(listener: socket.socket, timeout_s: float) -> TCPStore:
    """Host a job's store in this process. It takes ownership of `listener`."""
    host, port = listener.getsockname()[:2]
    limit, fd = datetime.timedelta(seconds=timeout_s), listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=fd)


def connect_store(port: int, timeout_s: float, host: str = LOOPBACK) -> TCPStore:
    """Connect to a job's store in another process."""
    return TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))


def rendezvous_store(place: RankInfo, timeout_s: float) -> Store | None:
    """Return the store at `place.store_address`, which rank 0 hosts, or torchrun's store; None if there is neither.

    Refuse an address that other hosts cannot reach, or whose port is taken. Raises OSError: it does not belong to rank
    0's host. Raises RuntimeError: this rank could not connect in time.
    """
    if place.store_address is None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        if attempt is None:
            return None
        # The store outlives the ranks: after a restart it still contains the keys of the previous attempt.
        store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
        return PrefixStore(f"attempt_{attempt}", store)
    host, port = place.store_address
    if place.rank:
        return connect_store(port, timeout_s, host)
    try:
        listener = listen(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        remedy = "Set it to another one. On Linux, ports below 32768 are not assigned automatically."
        raise refuse("MASTER_PORT", port, f"a free port on {host}", remedy) from None
    address = listener.getsockname()[0]
    if not place.single_host and ipaddress.ip_address(address).is_loopback:
        listener.close()
        expected = f"an address that other hosts reach; on the first host it is {address}"
        raise refuse("MASTER_ADDR", host, expected, "Set it to the address of an interface of the first host.")
    return host_store(listener, timeout_s)


def join_group(place: RankInfo, store: Store | None, timeout_s: float, cuda: bool) -> None:
    """Join the job's process group: NCCL on GPUs, gloo on CPUs.

    On one host, both listen on loopback only. On several hosts, gloo listens on the interface that leads to the first
    host. The environment may name other interfaces. Refuse a host without an interface that the others clearly reach.

    `store` is that of the rendezvous; None to use torch's environment variables. Raises RuntimeError: the other ranks
    did not join in time.
    """
    if place.single_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        # By default gloo uses the address of the host's own name. If that is 127.0.1.1, the ranks would hang.
        first_host = place.store_address[0] if place.store_address else os.environ.get("MASTER_ADDR", "")
        os.environ["GLOO_SOCKET_IFNAME"] = interface_to(first_host)
    if cuda:
        use_gpu(place.local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:  # the user's, or torchrun's 1
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.ranks_sharing_cpus))
    # Without device_id, NCCL connects lazily. With it, eight ranks hung when they left (torch 2.11, NCCL 2.28).
    backend, limit = "nccl" if cuda else "gloo", datetime.timedelta(seconds=timeout_s)
    if store is None:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    if cuda:
        # The first collective must be on the right device: in a barrier, NCCL would guess the device from the rank.
        dist.all_reduce(torch.zeros(1, device="cuda"))


def interface_to(host: str) -> str:
    """Return the network interface that leads to `host`, or that has its address if it is this host; never loopback.

    Refuse a loopback address, unless exactly one other interface of this host is up.
    """
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    with contextlib.suppress(OSError):  # a name that does not resolve, a network without a route
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket, so nothing is sent
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
    remedy = f"{host or 'MASTER_ADDR'} is a loopback address here, which they do not reach. Set GLOO_SOCKET_IFNAME."
    raise refuse("GLOO_SOCKET_IFNAME", "", expected, remedy)
