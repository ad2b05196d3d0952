"""Where ranks meet: at one address only, bound before anybody else can take it."""

from __future__ import annotations

import os
from dataclasses import replace

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_longctx.comm.rendezvous import Placement, host_store, join_store, listen, meet
from megatron_longctx.testing.distributed import run_distributed


def listening() -> set[str]:
    """Where this process listens."""
    connections = psutil.Process().net_connections("inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def _met(rank: int) -> tuple[set[str], str | None, str | None]:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    return listening(), os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


def test_ranks_of_one_host_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert run_distributed(_met, 2) == [({"127.0.0.1"}, "lo", "=lo")] * 2


def test_the_store_listens_where_it_is_told_to() -> None:
    before = listening()
    listener = listen()
    port = listener.getsockname()[1]
    with pytest.raises(OSError):  # from here on nobody else can have it
        listen(port=port)
    store = host_store(listener, 20.0)
    assert listening() - before <= {"127.0.0.1"} and store.port == port
    join_store(port, 20.0).set("a", "b")
    assert store.get("a") == b"b"


def test_tasks_meet_at_the_address_that_they_were_given() -> None:
    with listen() as free:
        port = free.getsockname()[1]
    place = Placement(0, 2, 0, meeting=("localhost", port), one_host=True)
    before = listening()
    first = meet(place, 20.0)
    second = meet(replace(place, rank=1), 20.0)
    assert first is not None and second is not None and listening() - before <= {"127.0.0.1", "::1"}
    second.set("a", "b")
    assert first.get("a") == b"b"
    assert meet(Placement(0, 2, 0), 20.0) is None, "torch's environment variables say how"


def test_an_address_that_other_hosts_do_not_reach_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MASTER_ADDR=localhost: expected an address that other hosts reach; on"):
        meet(Placement(0, 2, 0, meeting=("localhost", 0)), 20.0)
    with pytest.raises(OSError):
        meet(Placement(0, 2, 0, meeting=("203.0.113.7", 0)), 20.0)
