"""The bound of bytes on a link: below every plan that gathers keys, and reached by one."""

import pytest

from analysis.link_loads import GATHERING, busiest_seconds, least_seconds
from megatron_longctx.config.cluster import Cluster, Mesh, Network
from megatron_longctx.core.plans import Mask
from megatron_longctx.core.plans.build import build_plan
from megatron_longctx.core.plans.modes import MODES, ModeOptions
from megatron_longctx.core.plans.visibility import Visibility


@pytest.mark.parametrize("cluster", [
    Cluster("nodes", 2, 3, Mesh(8.0), Network(3, 1.0)), Cluster("one NIC", 3, 2, Mesh(8.0), Network(1, 1.0)),
    Cluster("mesh", 1, 5, Mesh(1.0)),
], ids=lambda each: each.name)  # fmt: skip
def test_plans_that_gather_are_above_the_bound_and_one_is_at_it(cluster: Cluster) -> None:
    times, mask = [], Mask.causal(720)
    for name in GATHERING:
        plan = build_plan(MODES[name].from_options(ModeOptions(cluster=cluster), cluster.n), cluster.n, mask)
        times.append(busiest_seconds(plan, cluster) / least_seconds(Visibility(mask, plan.queries, plan.keys), cluster))
    assert min(times) == pytest.approx(1.0, abs=1e-6)
    assert max(times) > 1.5
