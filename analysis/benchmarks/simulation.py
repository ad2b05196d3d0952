"""The time to plan and simulate both passes on many ranks, on one core and without a GPU.

The cluster is DGX H100s of 8 ranks; the rings of `usp` and `double_ring` are within and between these nodes.
"""

import argparse
import time
from dataclasses import replace
from itertools import pairwise

from megatron_longctx.config.cluster import load_cluster
from megatron_longctx.core.errors import refuse
from megatron_longctx.core.plans import MODES, ModeOptions, Workload, backward_plan, build_plan
from megatron_longctx.planner.simulate import simulate

from .report import Report, check_least, table

PHASES = ("plan", "forward", "backward plan", "backward")
_NODE = 8
_WORK = Workload(num_heads=32, num_kv_heads=8, head_dim=128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=1024, help=f"a multiple of {_NODE} (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank (default: %(default)s)")
    parser.add_argument(
        "--schedules", default="ring,helper,zigzag,striped,all_gather,usp", help="(default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write JSON and a Markdown table."""
    n, schedules = arguments.ranks, arguments.schedules.split(",")
    check_least("--ranks", n)
    check_least("--tokens", arguments.tokens)
    if n % _NODE:
        raise refuse("--ranks", n, f"a multiple of {_NODE}", "Nodes have as many ranks.")
    for schedule in schedules:
        if schedule not in MODES:
            raise refuse("--schedules", schedule, f"some of {','.join(MODES)}", "Separate names by commas.")
    measured = {schedule: seconds(schedule, n, n * arguments.tokens) for schedule in schedules}
    rows = [[name, *(f"{each:.1f}" for each in times.values())] for name, times in measured.items()]
    what, about = "seconds of one core, by mode and phase", f"causal, {n} ranks, {n * arguments.tokens:,} tokens"
    report = Report(arguments.out, "cpu", what, about, "seconds of one core to plan and simulate")
    data = {"ranks": n, "tokens": n * arguments.tokens, "measurements": measured}
    print(report.write(data, table(["mode", *PHASES, "sum"], rows)))


def seconds(schedule: str, n: int, tokens: int) -> dict[str, float]:
    """Return the seconds of every phase, and their sum."""
    cluster = replace(load_cluster("dgx_h100_x4").resized(_NODE), nodes=n // _NODE)
    times = [time.process_time()]
    forward = build_plan(schedule, n, tokens, ModeOptions(inner_size=_NODE if n > _NODE else None))
    times.append(time.process_time())
    simulate(forward, cluster, _WORK)
    times.append(time.process_time())
    backward = backward_plan(forward)
    times.append(time.process_time())
    simulate(backward, cluster, _WORK)
    times.append(time.process_time())
    phases = [after - before for before, after in pairwise(times)]
    return dict(zip((*PHASES, "sum"), (*phases, sum(phases)), strict=True))
