"""A pass that fails over peer memory leaves flags unset, so the next pass is refused instead of waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.attention.context_parallel import _DeviceState
from megatron_longctx.core.comm import (
    BufferPool,
    HybridTransport,
    P2PTransport,
    PeerMemoryError,
    PeerTransport,
    StreamClock,
)
from megatron_longctx.testing.distributed import run_distributed

CPU = torch.device("cpu")


def _transport(hybrid: bool) -> Any:
    group: Any = dist.group.WORLD
    peers = PeerTransport.__new__(PeerTransport)
    peers.group, peers.hosts, peers.generation = group, ((0, 1), (0, 1)), 1
    peers.rank, peers.world, peers.device, peers.peers = dist.get_rank(), dist.get_world_size(), CPU, (0, 1)
    peers._broken, peers._key, peers._capacity, peers._steps = None, "inference.transport", 2**20, 64
    if not hybrid:
        return peers
    transport = HybridTransport.__new__(HybridTransport)
    transport.peer, transport.p2p, transport.hosts = peers, P2PTransport(group, CPU), peers.hosts
    transport.device = CPU
    return transport


def _calls(rank: int, hybrid: bool) -> list[str]:
    attention = ContextParallelAttention(dist.group.WORLD, schedule="ring", kernel="reference")
    attention._devices[CPU] = _DeviceState(_transport(hybrid), BufferPool(CPU), StreamClock(CPU), StreamClock(CPU), 0)
    q = torch.zeros(4, 1, 2, 8)
    errors = []
    for _ in range(2):
        try:
            attention(q, q, q, mask=8)  # its transport has no memory: views of it fail
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_pass_after_a_failed_one_is_refused(hybrid: bool) -> None:
    for first, second in run_distributed(_calls, 2, hybrid):
        assert first.startswith("AttributeError")
        assert second.startswith(PeerMemoryError.__name__) and "broken off before (AttributeError" in second
        assert "choose inference.transport=p2p" in second, "the setting that this transport comes from"
