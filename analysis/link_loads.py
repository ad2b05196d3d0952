"""How near modes come to the least bytes that any plan must send over the busiest link of a described cluster.

    python -m analysis.link_loads [--out analysis/results]

A plan in which keys travel, by any rings or trees, brings every rank the keys that it sees. So two bounds hold. The
NICs of a node carry once what any of its ranks sees of other nodes. All links of a rank together carry what it sees.
Modes that share heads also send queries and results, and fewer heads of keys, so they may be below both.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import megatron_longctx.config.tasp  # noqa: F401 (registers the mode)
from analysis.benchmarks.report import table
from analysis.network.__main__ import NODES, SHARED
from megatron_longctx.config.cluster import GIB, Cluster, Switch, load_cluster
from megatron_longctx.core.plans import Kind, Mask, Plan
from megatron_longctx.core.plans.build import build_plan
from megatron_longctx.core.plans.modes import MODES, ModeOptions
from megatron_longctx.core.plans.visibility import Visibility
from megatron_longctx.core.plans.workload import Workload
from megatron_longctx.planner.cost import Costs
from megatron_longctx.planner.messages import MessageTimes

RESULTS = Path(__file__).parent / "results"
LENGTH = 32768
WORKLOAD = Workload(32, 8, 128)  # Llama-3-8B in bf16
GATHERING = ("node_gather", "all_gather", "tasp", "double_ring", "zigzag")
"""Modes in which only keys travel."""
SHARING = ("usp", "ulysses")


def clusters() -> list[Cluster]:
    """Return the described clusters of several GPUs, and those that `analysis.network` emulates."""
    names = ("h200_x8", "mi300x_x8", "h200_8x1_ib400", "a100_2x8", "dgx_h100_x4", "tcp")
    found = [load_cluster(name) for name in names]
    return [*found, found[3].resized(32), found[4].resized(16), NODES, SHARED]


def busiest_seconds(plan: Plan, cluster: Cluster) -> float:
    """Return the seconds for which the busiest link, port or NIC sends at its full rate."""
    messages = MessageTimes(plan.n, cluster, WORKLOAD, Costs(1.0, 1.0))
    for step in plan.steps:
        messages.exchange(step.moves, [0.0] * plan.n, [0.0] * plan.n)
    return max(messages.used.values())


def least_seconds(visible: Visibility, cluster: Cluster) -> float:
    """Return the larger of both bounds, in seconds."""
    n, m = cluster.n, cluster.ranks_per_node
    token = WORKLOAD.token_bytes(Kind.KV)
    bounds = []
    for node in range(cluster.nodes if cluster.nodes > 1 else 0):
        ranks = range(node * m, node * m + m)
        nics = sum(map(cluster.capacity, {cluster.ports(rank)[1] for rank in ranks}))
        remote = [home for home in range(n) if cluster.node_of(home) != node]
        seen = [block for rank in ranks for home in remote for block in visible.needed(rank, home)]
        slots = {(block.home, slot) for block in seen for slot in range(block.start, block.stop)}
        bounds.append(len(slots) * token / nics)
    inside = _ingress_gibps(cluster)
    for rank in range(n):
        tokens = sum(block.tokens for home in range(n) if home != rank for block in visible.needed(rank, home))
        nic = cluster.capacity(cluster.ports(rank)[1]) if cluster.nodes > 1 else 0.0
        bounds.append(tokens * token / (inside + nic))
    return max(bounds) / GIB


def _ingress_gibps(cluster: Cluster) -> float:
    """Return what a rank receives from the others of its node at most."""
    others, intra = cluster.ranks_per_node - 1, cluster.intra
    if not others or intra is None:
        return 0.0
    links = others * intra.rates.get("link", float("inf"))
    return min(links, intra.ingress_gibps) if isinstance(intra, Switch) else links


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.link_loads", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    out = parser.parse_args(argv).out
    mask, cells = Mask.causal(LENGTH), list[tuple[str, str, float]]()
    for cluster in clusters():
        options, n = ModeOptions(cluster=cluster), cluster.n
        for name in (*GATHERING, *SHARING):
            plan = build_plan(MODES[name].from_options(options, n), n, mask)
            least = least_seconds(Visibility(mask, plan.queries, plan.keys), cluster)
            where = f"{cluster.name}, {cluster.nodes} x {cluster.ranks_per_node}"
            cells.append((where, name, busiest_seconds(plan, cluster) / least))
            print(f"{where:<28} {name:<12} {cells[-1][2]:.2f}", flush=True)
    data = [{"cluster": where, "mode": name, "times": times} for where, name, times in cells]
    (out / "link_loads.json").write_text(json.dumps({"length": LENGTH, "cells": data}, indent=1) + "\n")
    rows: dict[str, list[str]] = {}
    for where, _, times in cells:
        rows.setdefault(where, [where]).append(f"{times:.2f}")
    head = ["cluster, nodes x ranks", *GATHERING, *SHARING]
    about = (
        f"Seconds of the busiest link, as a multiple of the bound; {LENGTH:,} tokens, causal, 32:8 heads, forward.\n\n"
    )
    (out / "link_loads.md").write_text("# Loads of links\n\n" + about + table(head, list(rows.values())) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
