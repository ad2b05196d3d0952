"""Which transport a group gets, and why not the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.comm import P2PTransport, choose_transport, transport_name
from megatron_longctx.testing.distributed import run_distributed


def _chosen(rank: int, name: str) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        transport = choose_transport(name, group, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    assert isinstance(transport, P2PTransport)
    return transport_name(transport)


@pytest.mark.parametrize("name", ["auto", "p2p"])
def test_cpus_send_point_to_point(name: str) -> None:
    assert run_distributed(_chosen, 2, name) == ["p2p", "p2p"]


def test_peer_memory_where_there_is_none_is_refused_by_all() -> None:
    said = run_distributed(_chosen, 2, "peer")
    assert said[0] == said[1] and "not all ranks have a CUDA device. Choose auto or p2p" in said[0]


def test_an_unknown_name_is_refused() -> None:
    (said,) = run_distributed(_chosen, 1, "pigeon")
    assert (
        said == "attention.transport=pigeon: expected one of auto, peer, p2p. Set attention.transport to one of these."
    )
