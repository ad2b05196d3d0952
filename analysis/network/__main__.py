"""Measure modes on emulated networks: `python -m analysis.network [--case mesh8] [--only NETWORK]`.

Writes `network_emulated.json`, `.md` (tables) and `.png`, or `network_CASE.*` for one case:

- `ratios`: `tasp` compared with `zigzag` for more computation; the machine must be idle;
- `sums`: modes on two nodes, with and without sums of partial gradients inside a node before they cross;
- `nodes`: modes across 2 x 2, 2 x 4 and 4 x 2 hosts whose devices are emulated, as links and as work is the limit, and
  what simulation takes;
- `overlap`: modes with and without overlap of messages and computation;
- the name of a network: all modes on it, causal and full.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_longctx.config.cluster import Cluster, Mesh, Network
from megatron_longctx.config.environment import environment
from megatron_longctx.core.plans import ModeOptions
from megatron_longctx.planner.cost import Costs, Workload

from . import job as tables
from .emulate import run
from .job import Job, Mode, Result

LINK = 0.0025  # GiB/s, about 21 Mbit/s: slow enough for a few CPU cores to keep up with all links at the same time
MESH8 = Cluster("mesh8", 1, 8, Mesh(LINK))
NODES = Cluster("nodes2x4", 2, 4, Mesh(8 * LINK), Network(4, LINK))
SHARED = Cluster("nodes2x4_one_nic", 2, 4, Mesh(16 * LINK), Network(1, 2 * LINK))
FLAT = ("ring", "zigzag", "striped", "helper", "all_gather", "ulysses")
HEADS = Workload(32, 32, 128, element_bytes=4)


def networks() -> dict[str, list[Job]]:
    """Return the jobs of every network, causal and full."""
    jobs = {}
    for cluster in (MESH8, NODES, SHARED):
        modes = [Mode(name) for name in FLAT] + [Mode("tasp", ModeOptions(cluster=cluster))]
        modes += [Mode("usp", ModeOptions(inner_size=k)) for k in ((2, 4) if cluster.nodes == 1 else (4,))]
        if cluster.nodes > 1:
            modes += [Mode(name, ModeOptions(inner_size=4)) for name in ("double_ring", "node_gather")]
        causal = Job(cluster, tuple(modes), length=256, workload=HEADS)
        full = replace(causal, causal=False, modes=tuple(m for m in modes if m.schedule not in ("striped", "helper")))
        jobs[cluster.name] = [causal, full]
    return jobs


def ratios() -> list[Job]:
    """Return one mesh with links of several speeds. With one KV head, there is most computation for every byte."""
    workload = Workload(8, 1, 128, element_bytes=4)
    modes = (Mode("zigzag"), Mode("tasp", ModeOptions(cluster=MESH8)))
    jobs = [Job(replace(MESH8, name="mesh8, 512 tokens"), modes, 512, workload, others=(256, 1024))]
    for times in (1, 2, 4, 8):
        name = f"mesh8, 2,048 tokens, {8.6 * LINK * times * 1000:.0f} Mbit/s"
        cluster = replace(MESH8, name=name, intra=Mesh(LINK * times))
        jobs.append(Job(cluster, modes, length=2048, workload=workload, others=(1024, 4096)))
    return jobs


def sums() -> list[Job]:
    """Return two nodes, with a NIC per rank and with one NIC."""
    jobs = []
    for cluster in (NODES, SHARED):
        named = [("zigzag", None), ("ring", None), ("double_ring", 4), ("tasp", None)]
        modes = [
            Mode(name, ModeOptions(inner_size=inner, cluster=cluster), setting)
            for name, inner in named
            for setting in (False, True)
        ]
        jobs.append(Job(cluster, tuple(modes), length=256, workload=HEADS))
    return jobs


def nodes() -> list[Job]:
    """Return hosts with a NIC per rank and an emulated device, with little work and with as much as messages."""
    jobs = []
    for hosts, ranks in ((2, 2), (2, 4), (4, 2)):
        for about, tflops in (("links are the limit", 4e-3), ("more to compute", 1.7e-4)):
            cluster = Cluster(f"{hosts} x {ranks}, {about}", hosts, ranks, Mesh(8 * LINK), Network(ranks, LINK))
            inner = ModeOptions(inner_size=ranks, cluster=cluster)
            modes = [Mode(name, inner, name != "usp") for name in ("node_gather", "usp", "double_ring")]
            modes += [Mode("node_gather", replace(inner, rounds=k * (hosts - 1)), True) for k in (2, 8)]
            modes += [Mode(name, ModeOptions(cluster=cluster), True) for name in ("tasp", "all_gather", "zigzag")]
            costs = Costs(tflops, 0.87 * tflops)
            jobs.append(Job(cluster, tuple(modes), length=256, workload=HEADS, device=costs))
    return jobs


def overlaps() -> list[Job]:
    """Return the meshes of `ratios` with the schedule that DistFlashAttn prints and two others."""
    modes = [Mode(name, overlap=overlap) for name in ("ring", "helper", "zigzag") for overlap in (False, True)]
    return [replace(job, modes=tuple(modes), others=()) for job in ratios()[2:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a case and write its files; return 1 if it failed."""
    jobs = networks()
    cases = {
        "all": ([job for each in jobs.values() for job in each], tables.speedups),
        **{name: (each, tables.speedups) for name, each in jobs.items()},
        "ratios": (ratios(), tables.ratios),
        "sums": (sums(), tables.sums),
        "nodes": (nodes(), tables.choices),
        "overlap": (overlaps(), tables.overlaps),
    }
    parser = argparse.ArgumentParser(prog="python -m analysis.network", description=__doc__)
    parser.add_argument("--case", default="all", choices=tuple(cases), help="what to measure")
    parser.add_argument("--only", default="", help="networks with this in their name, in place of those in the results")
    parser.add_argument("--out", type=Path, default=Path("analysis/results"), help="folder of the results")
    args = parser.parse_args(argv)
    if not args.out.is_dir():
        parser.error(f"--out {args.out}: expected a folder that exists")
    chosen, second_table = cases[args.case]
    chosen = [job for job in chosen if args.only in job.cluster.name]
    stem = args.out / ("network_emulated" if args.case == "all" else f"network_{args.case}")
    results: list[Result] = []
    measured: list[dict[str, Any]] = []
    if args.only:
        earlier, names = json.loads(stem.with_suffix(".json").read_text()), {job.cluster.name for job in chosen}
        measured = [each for each in earlier["networks"] if each["name"] not in names]
        results = [Result(**each) for each in earlier["measurements"] if each["network"] not in names]
    try:
        for job in chosen:
            print(f"{job.cluster.name}, {'causal' if job.causal else 'full'}", file=sys.stderr)
            outcome = run(job)
            results += outcome.results
            measured.append({
                "name": job.cluster.name, "causal": job.causal, "length": job.length, "workload": asdict(job.workload),
                "repeats": job.repeats, "cluster": asdict(job.cluster),
                "links_measured_over_described": outcome.links,
                "step_s": outcome.step_s, "message_s": outcome.message_s,
                "date": environment()["date"], "load": os.getloadavg(),
            })  # fmt: skip
    except (PermissionError, RuntimeError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    facts = environment()
    data = {"what": "modes on emulated networks, forward and backward", "environment": facts, "networks": measured}
    shown = f"{tables.table(results)}\n\n{second_table(results)}"
    text = f"{facts['date'][:10]}, commit {str(facts['commit'])[:9]}. Seconds.\n\n{shown}\n"
    stem.with_suffix(".md").write_text(text)
    data["measurements"] = [asdict(each) for each in results]
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    tables.draw(results, stem.with_suffix(".png"))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
