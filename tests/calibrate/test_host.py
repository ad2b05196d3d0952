"""The pace of hosts is measured by whole passes, and all ranks get the same figure."""

from __future__ import annotations

import pytest
import torch

from megatron_longctx.calibrate.host import host_operation_seconds
from megatron_longctx.calibrate.kernels import Place
from megatron_longctx.comm import choose_transport
from megatron_longctx.schedules import Costs, Workload
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.topology import Cluster, Mesh
from megatron_longctx.training.ranks import world_group


def _seconds(rank: int) -> float:
    cpu, group = torch.device("cpu"), world_group()
    place = Place(group, cpu, Workload(4, 2, 16, element_bytes=4), links=choose_transport("p2p", group, cpu))
    return host_operation_seconds(place, Cluster("one", 1, place.n, Mesh(10.0)), Costs(1.0, 1.0))


@pytest.mark.parametrize("n", [2, 3])
def test_all_ranks_agree_on_the_pace(n: int) -> None:
    (first, *others) = run_distributed(_seconds, n)
    assert 0 < first < 1 and set(others) == {first}
