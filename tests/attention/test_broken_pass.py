"""A pass that fails over peer memory leaves flags that nobody sets: the next one is refused instead of waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.comm import BufferPool, MixedTransport, PeerMemoryError, PeerTransport
from megatron_longctx.testing.distributed import run_distributed

CPU = torch.device("cpu")


def _transport(mixed: bool) -> Any:
    peers = PeerTransport.__new__(PeerTransport)
    peers.group = dist.group.WORLD  # type: ignore[assignment]
    peers.rank, peers.world, peers.device, peers.peers = dist.get_rank(), dist.get_world_size(), CPU, (0, 1)
    peers._broken, peers._key = None, "inference.transport"
    if not mixed:
        return peers
    transport = MixedTransport.__new__(MixedTransport)
    transport.peers = peers
    return transport


def _calls(rank: int, mixed: bool) -> list[str]:
    attention = ContextParallelAttention(dist.group.WORLD, schedule="ring", kernel="reference", graph_tokens=0)
    transport = _transport(mixed)
    attention._links[CPU] = (transport, BufferPool(CPU))
    q = torch.zeros(4, 1, 2, 8)
    said = []
    for _ in range(2):
        try:
            attention(q, q, q, length=8)  # its transport was never set up: making the mailbox fails
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("mixed", [False, True])
def test_the_pass_after_a_failed_one_is_refused(mixed: bool) -> None:
    for first, second in run_distributed(_calls, 2, mixed):
        assert first.startswith("AttributeError")
        assert second.startswith(PeerMemoryError.__name__) and "broken off before (AttributeError" in second
        assert "choose inference.transport=p2p" in second, "the setting that this transport comes from"
