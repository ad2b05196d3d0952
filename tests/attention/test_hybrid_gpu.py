"""Blocks through peer memory within declared hosts and over NCCL between them, on one machine."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.attention import context_parallel
from megatron_longctx.comm import HybridTransport, PeerTransport, choose_transport
from megatron_longctx.comm.symmetric import RANKS_PER_HOST, find_hosts
from megatron_longctx.gpus import gpu_ranks
from megatron_longctx.kernels import PROVIDERS
from megatron_longctx.testing.distributed import run_distributed
from tests.attention.test_attention_gpu import _every_case, request

pytestmark = pytest.mark.gpu


def _forced(name: str, group: dist.ProcessGroup, device: torch.device) -> HybridTransport:
    """Also where no host has two ranks, so that all goes point to point."""
    return HybridTransport(PeerTransport(group, device, find_hosts(group, device)))


def _hybrid(rank: int, n: int, per_host: int, kernels: list[str]) -> dict[str, Any]:
    os.environ[RANKS_PER_HOST] = str(per_host)
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    assert group is not None
    found: dict[str, Any] = {"auto": choose_transport("auto", group, device).name}
    try:
        choose_transport("peer", group, device)
    except ValueError as error:
        found["refused"] = str(error)
    context_parallel.choose_transport = _forced
    found["wrong"] = _every_case(rank, n, kernels, "auto")
    return found


@pytest.mark.parametrize(("n", "per_host"), [(2, 1), (4, 2), (4, 3), (8, 4)])
def test_as_good_as_one_gpu_over_two_kinds_of_links(n: int, per_host: int) -> None:
    if gpu_ranks() < n:
        pytest.skip(f"needs {n} CUDA devices, found {gpu_ranks()}")
    kernels = [name for name in ("cudnn", "flash") if PROVIDERS[name]().why_not(request("GQA")) is None][:1]
    if not kernels:
        pytest.skip("no kernel")
    ranks = run_distributed(_hybrid, n, n, per_host, kernels, backend="nccl", timeout=400)
    assert {found["auto"] for found in ranks} == {"p2p" if per_host == 1 else "hybrid"}
    assert all("they are on several hosts" in found["refused"] for found in ranks)
    wrong = [line for found in ranks for line in found["wrong"]]
    assert not wrong, "\n".join(wrong)
