"""The emulated network: links are limited and modes are right; skipped if the machine does not permit it."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analysis.network import emulate, job
from analysis.network.device import Device
from megatron_longctx.config.cluster import Cluster, Mesh, Network, Switch
from megatron_longctx.core.kernels.interface import BlockInputs, dense_call
from megatron_longctx.core.plans import ModeOptions
from megatron_longctx.planner.cost import Costs, Workload
from tests.shared.jobs import PATIENCE_S


@pytest.fixture
def permitted() -> None:
    reason = emulate.reason_not_possible()
    if reason is not None:
        pytest.skip(f"no network can be emulated here: {reason}")


@pytest.mark.parametrize(
    "cluster",
    [Cluster("mesh2", 1, 2, Mesh(0.02)), Cluster("nodes2x2", 2, 2, Mesh(0.1), Network(1, 0.02))],
    ids=lambda cluster: cluster.name,
)
def test_links_are_limited_and_modes_are_right(permitted: None, cluster: Cluster) -> None:
    inner = cluster.ranks_per_node
    gather = job.Mode("node_gather", ModeOptions(inner_size=inner, cluster=cluster), sum_in_node=cluster.nodes > 1)
    modes = (job.Mode("zigzag"), job.Mode("tasp"), job.Mode("zigzag", overlap=False), gather)
    device = Costs(1e-5, 1e-5) if cluster.nodes > 1 else None  # with it, all calls of a rank take 0.1 s
    workload = Workload(8, 8, 64, element_bytes=4)
    outcome = emulate.run(
        job.Job(cluster, modes, length=64, workload=workload, repeats=1, device=device), timeout=PATIENCE_S
    )
    low, high = outcome.links
    assert 0.5 < low <= high < 1.6  # flows get unequal shares of the described rate; loopback is 100 times as fast
    assert [result.mode for result in outcome.results] == ["zigzag", "tasp", "zigzag, no overlap", gather.name]
    for result in outcome.results:
        assert result.error < 1e-5 and result.predicted_backward_s > 0 and result.computing > 0
        assert result.forward_s > (0.1 if device else 0)


def test_a_send_is_done_when_it_has_left(permitted: None) -> None:
    build = "from analysis.network.emulate import *; build(Cluster('pair', 1, 2, Mesh(0.005)))"  # 0.2 s for 1 MiB
    receive = "import socket; one = socket.create_server(('10.78.0.2', 5000)).accept()[0]\nwhile one.recv(2**20): pass"
    send = """import socket, time; one = socket.socket()
while one.connect_ex(("10.78.0.2", 5000)): time.sleep(0.05)
one.sendall(bytes(2**20)); time.sleep(0.6)  # the window is open, and all has left
start = time.perf_counter(); one.sendall(bytes(2**20)); print(time.perf_counter() - start)"""
    steps = 'mount -t tmpfs tmpfs /run; "$0" -c "$1"; '
    steps += "".join(f'ip netns exec rank{rank} "$0" -c "${3 - rank}" {"&" * rank} ' for rank in (1, 0))
    command = [*emulate._ISOLATED, "sh", "-c", steps, sys.executable, build, receive, send]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S, cwd=emulate.ROOT)
    assert float(done.stdout) > 0.15


def test_calls_of_an_emulated_device_take_their_time_beside_the_host() -> None:
    device = Device(Costs(1e-6, 1e-6, call_s=0.4), Workload(2, 1, 8, element_bytes=4))
    q, kv = torch.ones(3, 1, 2, 8), torch.ones(3, 1, 1, 8)
    issued = time.perf_counter()
    for backward in (False, True):
        device.call(issued, BlockInputs(q, kv, kv, dense_call(3, 3), 1.0), backward)
    work = 2 * 9 * 2 * (16 + 40) / 1e6
    assert device.free == pytest.approx(issued + 0.8 + work)
    assert time.perf_counter() < device.free
    device.synchronize()
    assert time.perf_counter() >= device.free


def test_a_failing_rank_ends_the_job_with_its_error(permitted: None) -> None:
    bad = job.Job(Cluster("mesh2", 1, 2, Mesh(1.0)), (job.Mode("spiral"),), 16, Workload(1, 1, 8, element_bytes=4))
    with pytest.raises(RuntimeError, match=r"(?s)mesh2: a rank failed.*spiral"):
        emulate.run(bad, timeout=PATIENCE_S)


def test_links_that_are_not_emulated_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a mesh inside each node"):
        emulate.build(Cluster("switch", 1, 4, Switch(1.0, 1.0)))


def test_tables_mark_wrong_predictions(tmp_path: Path) -> None:
    found = [
        job.Result("mesh", "zigzag", True, 4.0, 4.0, 4.0, 4.0, 1e-7, computing=0.5),
        job.Result("mesh", "tasp", True, 1.0, 1.0, 1.0, 2.0, 1e-7),
        job.Result("mesh", "zigzag", False, 2.0, 2.0, 2.0, 2.0, 1e-7),
    ]
    rows = job.table(found).splitlines()
    assert job.choices(found).splitlines()[2] == "| mesh, causal | tasp | tasp | 0.0% |"
    worse = [replace(each, predicted_forward_s=0.1, predicted_backward_s=0.1) for each in found[:1]]
    assert job.choices([*worse, *found[1:]]).splitlines()[2] == "| mesh, causal | tasp | zigzag | 300.0% |"
    assert "| 1.50 (!) |" in rows[2] and "tasp" in rows[2] and "(!)" not in rows[3]
    assert "| mesh, causal | tasp |  | 4.00 / 4.00 |" in job.speedups(found)
    assert "| mesh | 0.50 | 4.00 + 4.00 | 1.00 + 1.00 | 4.00 | 4.00 | 4.00 |" in job.ratios(found[:2])
    less = job.Result("mesh", "zigzag, summed", True, 4.0, 2.0, 4.0, 1.0, 1e-7)
    assert "| mesh, causal | zigzag | 2.00 | 4.00 | 1.33 |" in job.sums([*found, less])
    apart = job.Result("mesh", "zigzag, no overlap", True, 6.0, 2.0, 5.0, 4.0, 1e-7)
    assert "| mesh, causal | zigzag | 1.50 | 1.25 | 0.50 | 1.00 |" in job.overlaps([*found, apart])
    job.draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
