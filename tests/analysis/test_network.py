"""The emulated network: its links are limited, modes run over it and are right; skipped where it is not permitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.network import emulate, job, report, run
from megatron_longctx.schedules.cost import Workload
from megatron_longctx.topology import Cluster, Mesh, Network, Switch
from tests.shared.jobs import PATIENCE_S


@pytest.fixture
def permitted() -> None:
    reason = emulate.reason_not_possible()
    if reason is not None:
        pytest.skip(f"no network can be emulated here: {reason}")


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster("mesh3", 1, 3, Mesh(0.02)),
        Cluster("nodes2x2", 2, 2, Mesh(0.1), Network(1, 0.02)),
    ],
    ids=lambda cluster: cluster.name,
)
def test_links_are_limited_and_modes_are_right(permitted: None, cluster: Cluster) -> None:
    modes = (job.Mode("zigzag"), job.Mode("tasp"), job.Mode("zigzag", overlap=False))
    outcome = run.run(
        job.Job(cluster, modes, length=64, workload=Workload(8, 8, 64, element_bytes=4), repeats=1), timeout=PATIENCE_S
    )
    low, high = outcome.links
    assert 0.5 < low <= high < 1.6  # of the described rate, of which flows get unequal shares; loopback is 100 times it
    assert [found.mode for found in outcome.found] == ["zigzag", "tasp", "zigzag, no overlap"]
    for found in outcome.found:
        assert found.error < 1e-5 and found.forward_s > 0 and found.predicted_backward_s > 0 and found.computing > 0


def test_a_failing_rank_ends_the_job_with_what_it_said(permitted: None) -> None:
    bad = job.Job(Cluster("mesh2", 1, 2, Mesh(1.0)), (job.Mode("spiral"),), 16, Workload(1, 1, 8, element_bytes=4))
    with pytest.raises(RuntimeError, match=r"(?s)mesh2: a rank failed.*spiral"):
        run.run(bad, timeout=PATIENCE_S)


def test_links_that_are_not_emulated_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a mesh inside each node"):
        emulate.build(Cluster("switch", 1, 4, Switch(1.0, 1.0)))


def test_reports_mark_what_was_predicted_badly(tmp_path: Path) -> None:
    found = [
        job.Found("mesh", "zigzag", True, 4.0, 4.0, 4.0, 4.0, 1e-7, computing=0.5),
        job.Found("mesh", "tasp", True, 1.0, 1.0, 1.0, 2.0, 1e-7),
        job.Found("mesh", "zigzag", False, 2.0, 2.0, 2.0, 2.0, 1e-7),
    ]
    rows = report.table(found).splitlines()
    assert "| 1.50 (!) |" in rows[2] and "tasp" in rows[2] and "(!)" not in rows[3]
    assert "| mesh, causal | tasp |  | 4.00 / 4.00 |" in report.speedups(found)
    assert "| mesh | 0.50 | 4.00 + 4.00 | 1.00 + 1.00 | 4.00 | 4.00 | 4.00 |" in report.ratios(found[:2])
    less = job.Found("mesh", "zigzag, summed", True, 4.0, 2.0, 4.0, 1.0, 1e-7)
    assert "| mesh, causal | zigzag | 2.00 | 4.00 | 1.33 |" in report.sums([*found, less])
    apart = job.Found("mesh", "zigzag, no overlap", True, 6.0, 2.0, 5.0, 4.0, 1e-7)
    assert "| mesh, causal | zigzag | 1.50 | 1.25 | 0.50 | 1.00 |" in report.overlaps([*found, apart])
    report.draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
