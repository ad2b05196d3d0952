"""Draw the pictures of docs/schedules.md: `python -m analysis.schedule_pictures [--out docs/images/schedules]`.

One causal attention layer, 32 query and 8 key/value heads of 128, on 8 H200s whose figures are the data sheets'.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_longctx.schedules import MODES, ModeOptions, Target, Workload, build_plan
from megatron_longctx.schedules import mask as masks
from megatron_longctx.schedules.draw import draw_modes, draw_timeline
from megatron_longctx.schedules.select import Problem, rank_modes
from megatron_longctx.schedules.simulate import simulate
from megatron_longctx.topology import load_cluster

RANKS, LENGTH, WORKLOAD = 8, 32768, Workload(32, 8, 128)
OPTIONS = ModeOptions(inner_size=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images/schedules"), help="folder of the pictures")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    cluster = load_cluster("h200_x8")
    for name in MODES:
        plan = build_plan(name, RANKS, LENGTH, OPTIONS)
        draw_timeline(simulate(plan, cluster, WORKLOAD, timeline=True), out / f"{name}.png")
        print(out / f"{name}.png")
    problem = Problem(RANKS, masks.causal(LENGTH), Target(WORKLOAD), keep_received="auto")
    ranking = rank_modes(problem, cluster, timeline=True)
    draw_modes(ranking, out / "all.png", f"{LENGTH:,} tokens on {RANKS} H200s, heads 32:8, simulated")


if __name__ == "__main__":
    main()
