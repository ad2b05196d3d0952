"""Measure the modes on emulated networks: `python -m analysis.network [--case mesh8] [--out FOLDER]`.

Writes `network_emulated.json`, `.md` (a table) and `.png` (a picture); with `--case ratios` `network_ratios.*`: `tasp`
beside `zigzag` where there is more to compute, for which the machine must be idle; with `--case sums` `network_sums.*`:
modes on two nodes with partial gradients summed inside a node before they cross, and without; with `--case overlap`
`network_overlap.*`: modes whose messages travel while they compute, and the same where these are waited for first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megatron_longctx.metrics.environment import environment
from megatron_longctx.schedules import ModeOptions
from megatron_longctx.schedules.cost import Workload
from megatron_longctx.topology import Cluster, Mesh, Network

from .job import Found, Job, Mode
from .report import draw, speedups, table
from .report import overlaps as overlap_table
from .report import ratios as ratio_table
from .report import sums as sum_table
from .run import run

LINK = 0.0025  # GiB/s, some 21 Mbit/s: slow enough that a few CPU cores keep up with all links at once
MESH8 = Cluster("mesh8", 1, 8, Mesh(LINK))
NODES = Cluster("nodes2x4", 2, 4, Mesh(8 * LINK), Network(4, LINK))
SHARED = Cluster("nodes2x4_one_nic", 2, 4, Mesh(16 * LINK), Network(1, 2 * LINK))
FLAT = ("ring", "zigzag", "striped", "helper", "all_gather", "ulysses")


def jobs() -> dict[str, list[Job]]:
    """The cases by name: one network, causal and full."""
    found = {}
    for cluster in (MESH8, NODES, SHARED):
        options = ModeOptions(cluster=cluster)
        modes = [Mode(name) for name in FLAT] + [Mode("tasp", options)]
        inner = (2, 4) if cluster.nodes == 1 else (4,)
        modes += [Mode("usp", ModeOptions(inner_size=k)) for k in inner]
        modes += [Mode("double_ring", ModeOptions(inner_size=k)) for k in (4,) if cluster.nodes > 1]
        causal = Job(cluster, tuple(modes), length=256, workload=Workload(32, 32, 128, element_bytes=4))
        full = replace(causal, causal=False, modes=tuple(m for m in modes if m.schedule not in ("striped", "helper")))
        found[cluster.name] = [causal, full]
    return found


def ratios() -> list[Job]:
    """One mesh with links of several speeds; one KV head, since every byte is then computed with most."""
    workload = Workload(8, 1, 128, element_bytes=4)
    modes = (Mode("zigzag"), Mode("tasp", ModeOptions(cluster=MESH8)))
    found = [Job(replace(MESH8, name="mesh8, 512 tokens"), modes, 512, workload, others=(256, 1024))]
    for times in (1, 2, 4, 8):
        name = f"mesh8, 2,048 tokens, {8.6 * LINK * times * 1000:.0f} Mbit/s"
        cluster = replace(MESH8, name=name, intra=Mesh(LINK * times))
        found.append(Job(cluster, modes, length=2048, workload=workload, others=(1024, 4096)))
    return found


def sums() -> list[Job]:
    """Two nodes, with a NIC for each rank and with one."""
    found = []
    for cluster in (NODES, SHARED):
        named = [("zigzag", None), ("ring", None), ("double_ring", 4), ("tasp", None)]
        modes = [
            Mode(name, ModeOptions(inner_size=inner, cluster=cluster), setting)
            for name, inner in named
            for setting in ("false", "true")
        ]
        found.append(Job(cluster, tuple(modes), length=256, workload=Workload(32, 32, 128, element_bytes=4)))
    return found


def overlaps() -> list[Job]:
    """Meshes of `ratios`, with the schedule that DistFlashAttn prints and two others."""
    modes = [Mode(name, overlap=overlap) for name in ("ring", "helper", "zigzag") for overlap in (False, True)]
    return [replace(job, modes=tuple(modes), others=()) for job in ratios()[2:]]


def main(arguments: Sequence[str] | None = None) -> int:
    cases = jobs()
    parser = argparse.ArgumentParser(prog="python -m analysis.network", description=__doc__)
    parser.add_argument(
        "--case", default="all", choices=("all", *cases, "ratios", "sums", "overlap"), help="which network"
    )
    parser.add_argument("--out", type=Path, default=Path("analysis/results"), help="folder of the results")
    args = parser.parse_args(arguments)
    if not args.out.is_dir():
        parser.error(f"--out {args.out}: expected a folder that exists")
    if args.case == "ratios":
        chosen, tables = ratios(), (table, ratio_table)
    elif args.case == "overlap":
        chosen, tables = overlaps(), (table, overlap_table)
    elif args.case == "sums":
        chosen, tables = sums(), (table, sum_table)
    else:
        chosen, tables = [job for name in cases if args.case in ("all", name) for job in cases[name]], (table, speedups)
    found: list[Found] = []
    networks = []
    try:
        for job in chosen:
            print(f"{job.cluster.name}, {'causal' if job.causal else 'full'}", file=sys.stderr)
            outcome = run(job)
            found += outcome.found
            networks.append({
                "name": job.cluster.name, "causal": job.causal, "length": job.length, "workload": asdict(job.workload),
                "repeats": job.repeats, "cluster": asdict(job.cluster),
                "links_measured_over_described": outcome.links,
                "step_s": outcome.step_s, "message_s": outcome.message_s,
            })  # fmt: skip
    except (PermissionError, RuntimeError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    facts = environment()
    data = {"what": "modes on emulated networks, forward and backward", "environment": facts, "networks": networks}
    stem = args.out / ("network_emulated" if args.case == "all" else f"network_{args.case}")
    shown = "\n\n".join(write(found) for write in tables)
    text = f"{facts['date'][:10]}, commit {str(facts['commit'])[:9]}. Seconds.\n\n{shown}\n"
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(
        json.dumps({**data, "measurements": [asdict(each) for each in found]}, indent=1) + "\n"
    )
    draw(found, stem.with_suffix(".png"))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
