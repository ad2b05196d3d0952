"""The pace of hosts is measured by whole passes, and all ranks get the same figure."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.bench.calibrate_host import host_operation_seconds
from megatron_longctx.comm import choose_transport
from megatron_longctx.kernels import KernelRequest, choose
from megatron_longctx.schedules import Workload
from megatron_longctx.testing.distributed import run_distributed


def _seconds(rank: int) -> float:
    links = choose_transport("p2p", dist.group.WORLD, torch.device("cpu"))
    kernel = choose("auto", KernelRequest("cpu", torch.float32, 16, 4, 2, varying=True))
    return host_operation_seconds(links, kernel, Workload(4, 2, 16, element_bytes=4), torch.float32)


@pytest.mark.parametrize("n", [2, 3])
def test_all_ranks_agree_on_the_pace(n: int) -> None:
    (first, *others) = run_distributed(_seconds, n)
    assert 0 < first < 1 and set(others) == {first}
