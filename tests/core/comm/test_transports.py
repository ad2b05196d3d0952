"""The choice of a transport."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.core.comm import P2PTransport, choose_transport
from megatron_longctx.testing.distributed import run_distributed


def _chosen(rank: int, name: str) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        transport = choose_transport(name, group, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    assert isinstance(transport, P2PTransport)
    return transport.name


@pytest.mark.parametrize("name", ["auto", "p2p"])
def test_cpus_send_point_to_point(name: str) -> None:
    assert run_distributed(_chosen, 2, name) == ["p2p", "p2p"]


def test_all_ranks_refuse_peer_memory_on_cpus() -> None:
    errors = run_distributed(_chosen, 2, "peer")
    assert errors[0] == errors[1] and "not all ranks have a CUDA device. Choose auto or p2p" in errors[0]


def test_an_unknown_transport_is_refused() -> None:
    expected = "transport=pigeon: expected one of auto, peer, p2p. Set transport to one of these."
    assert run_distributed(_chosen, 1, "pigeon") == [expected]
