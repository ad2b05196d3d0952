"""Peer memory on GPUs: what cannot be had is refused by all ranks at once, and a broken pass is the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.comm import PeerMemoryError, PeerTransport, symmetric
from megatron_longctx.comm.hosts import Hosts
from megatron_longctx.gpus import gpu_ranks
from megatron_longctx.kernels import AttentionKernel
from megatron_longctx.testing.distributed import run_distributed

pytestmark = pytest.mark.gpu(2)


def _error(work: Any) -> str:
    try:
        return f"no error: {work()}"
    except PeerMemoryError as error:
        return str(error)


class _Full:
    """Symmetric memory of a rank on which nothing is left."""

    @staticmethod
    def empty(size: int, **_: Any) -> Any:
        raise torch.OutOfMemoryError(f"no {size} bytes here")


def _too_much(rank: int) -> list[str]:
    """More than any GPU has; then a rank that alone has none left."""
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    assert group is not None
    transport = PeerTransport(group, device)
    transport.provide(2**24, 1)
    found = [_error(lambda: transport.provide(2**42, 1))]
    found += [_error(lambda: transport.provide(2**42, 1)), _error(lambda: transport.provide(8, 1))]
    found += [_error(lambda: PeerTransport(group, device).generation)]  # a new one is none the worse
    real = symmetric.symmetric_memory
    if rank == 1:
        symmetric.symmetric_memory = lambda: _Full
    found += [_error(lambda: PeerTransport(group, device))]
    symmetric.symmetric_memory = real
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    half = Hosts(((0, 1),), "for the test")
    half = Hosts((*half.sets, *((r,) for r in range(2, dist.get_world_size()))), half.reason)
    return [*found, _error(lambda: PeerTransport(group, device, half).peers)]


def test_memory_that_one_rank_cannot_have_is_refused_by_all() -> None:
    n = 3 if gpu_ranks() >= 3 else 2
    ranks = run_distributed(_too_much, n, backend="nccl", timeout=120)
    assert all(found == ranks[0] for found in ranks), ranks
    refused, again, begun, new, alone, divided = ranks[0]
    assert refused.startswith("setting up peer memory (2 x 4096.00 GiB on every rank) failed on rank")
    assert "broken off before" in again and "broken off before" in begun
    assert new == "no error: 1"
    assert f"failed on rank 1 of the group's {n}: OutOfMemoryError" in alone
    assert n == 2 or "different numbers of process groups" in divided


def _broken(rank: int) -> list[Any]:
    """A kernel fails on all ranks in the middle of a pass, and somebody catches that."""
    device = torch.device("cuda", torch.cuda.current_device())
    attention = ContextParallelAttention(dist.group.WORLD, schedule="ring", transport="peer")
    layout = attention.layout(2048)
    q = torch.randn(layout.num_tokens(rank), 1, 8, 128, device=device, dtype=torch.bfloat16)

    def call() -> Any:
        return attention(q, q, q, mask=2048).float().norm().isfinite().item()

    found: list[Any] = [call()]
    forward = AttentionKernel.forward

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("a kernel gave up")

    AttentionKernel.forward = fails  # type: ignore[method-assign]
    try:
        call()
    except ArithmeticError as error:
        found.append(str(error))
    AttentionKernel.forward = forward  # type: ignore[method-assign]
    return [*found, _error(call)]


def test_a_pass_after_a_broken_one_is_refused_and_nothing_hangs() -> None:
    for first, failed, refused in run_distributed(_broken, 2, backend="nccl", timeout=120):
        assert first is True and failed == "a kernel gave up"
        assert "broken off before (ArithmeticError: a kernel gave up)" in refused
