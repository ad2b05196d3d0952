"""The rendezvous of ranks: at one address only, which is bound before another process can take it."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_longctx.testing.distributed import PATIENCE_S, run_distributed
from megatron_longctx.training import rendezvous
from megatron_longctx.training.rendezvous import (
    RankInfo,
    connect_store,
    host_store,
    interface_to,
    join_group,
    listen,
    rendezvous_store,
)


def listening() -> set[str]:
    """Return the addresses at which this process listens."""
    connections = psutil.Process().net_connections("inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def _listening(rank: int) -> tuple[set[str], str | None, str | None]:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    return listening(), os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


def test_ranks_of_one_host_listen_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert run_distributed(_listening, 2) == [({"127.0.0.1"}, "lo", "=lo")] * 2


def test_the_store_listens_at_its_socket_only() -> None:
    before = listening()
    listener = listen()
    port = listener.getsockname()[1]
    with pytest.raises(OSError):  # no other process can take it
        listen(port=port)
    store = host_store(listener, 20.0)
    assert listening() - before <= {"127.0.0.1"} and store.port == port
    connect_store(port, 20.0).set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("omp", [None, "3"])
def test_ranks_share_the_cpus_unless_the_user_sets_their_threads(
    monkeypatch: pytest.MonkeyPatch, omp: str | None
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(rendezvous.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(rendezvous.torch, "set_num_threads", threads.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    join_group(RankInfo.local(0, 4), None, 1.0, cuda=False)
    assert threads == ([] if omp else [2])


def _hosts(listener: socket.socket) -> None:
    host_store(listener, PATIENCE_S).wait(["ended"])


def test_a_port_is_never_free_while_it_is_handed_to_rank_0() -> None:
    """The launcher of training binds it; seconds later, rank 0 hosts the store there."""
    with listen() as listener:
        port = listener.getsockname()[1]
        process = multiprocessing.get_context("spawn").Process(target=_hosts, args=(listener,))
        process.start()
    for _ in range(100):
        with pytest.raises(OSError):
            listen(port=port)
        time.sleep(0.01)
    connect_store(port, PATIENCE_S).set("ended", "")
    process.join()
    assert process.exitcode == 0


def test_tasks_connect_at_the_address_of_their_environment() -> None:
    with listen() as free:
        port = free.getsockname()[1]
    place = RankInfo(0, 2, 0, store_address=("localhost", port), single_host=True)
    before = listening()
    first = rendezvous_store(place, 20.0)
    second = rendezvous_store(replace(place, rank=1), 20.0)
    assert first is not None and second is not None and listening() - before <= {"127.0.0.1", "::1"}
    second.set("a", "b")
    assert first.get("a") == b"b"
    assert rendezvous_store(RankInfo(0, 2, 0), 20.0) is None, "torch's environment variables specify the rendezvous"


def test_each_attempt_of_torchrun_has_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = host_store(listen(), 20.0)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (env | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    counts = []
    for attempt in ("0", "1", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store = rendezvous_store(RankInfo(0, 1, 0), 20.0)
        assert store is not None
        counts.append(store.add("ranks here", 1))
    assert counts == [1, 1, 2]


def test_unreachable_addresses_and_taken_ports_are_refused() -> None:
    with pytest.raises(ValueError, match=r"MASTER_ADDR=localhost: expected an address that other hosts reach; on"):
        rendezvous_store(RankInfo(0, 2, 0, store_address=("localhost", 0)), 20.0)
    with pytest.raises(OSError):
        rendezvous_store(RankInfo(0, 2, 0, store_address=("203.0.113.7", 0)), 20.0)
    with listen() as taken, pytest.raises(ValueError, match=r"MASTER_PORT=\d+: expected a free port on"):
        rendezvous_store(RankInfo(0, 2, 0, store_address=("127.0.0.1", taken.getsockname()[1])), 20.0)


def _interfaces(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    """Give this host these interfaces, all of them up."""
    known = {name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=True) for name in known})


def test_gloo_listens_on_the_interface_that_leads_to_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, address: tuple[str, int]) -> None:
            self.source = {"10.1.0.1": "10.1.0.2"}.get(address[0], "127.0.0.1")

        def getsockname(self) -> tuple[str, int]:
            return self.source, 1

    monkeypatch.setattr(socket, "socket", Probe)
    _interfaces(monkeypatch, lo="127.0.0.1", eth0="192.0.2.2", ib0="10.1.0.2")
    assert interface_to("10.1.0.1") == "ib0"
    expected = r"^GLOO_SOCKET_IFNAME=: expected the interface of this host that the others reach, one of eth0, ib0"
    with pytest.raises(ValueError, match=expected):
        interface_to("127.0.1.1")  # Debian's address of a host's own name
    _interfaces(monkeypatch, lo="127.0.0.1", eth0="192.0.2.2")
    assert interface_to("127.0.1.1") == interface_to("no such host.invalid") == "eth0"


def test_slurm_provides_the_rank_and_the_tasks_that_share_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    env |= {"SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7", "SLURM_CPUS_PER_TASK": "2"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert RankInfo.from_environment(env) == RankInfo(5, 8, 1, 4, ("a", 7))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))  # Slurm has bound it
    assert RankInfo.from_environment(env) == RankInfo(5, 8, 1, 1, ("a", 7))
    assert RankInfo.from_environment(env | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    with pytest.raises(ValueError, match="MASTER_PORT=: expected a free port's number"):
        RankInfo.from_environment(env | {"MASTER_PORT": ""})
    assert RankInfo.from_environment(env | {"RANK": "0", "WORLD_SIZE": "2"}) == RankInfo(0, 2, 0)
