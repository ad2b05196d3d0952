"""The host's work for a new packed batch before its first call: layout, plans, send layouts and passes, on one core.

Nothing is exchanged and no GPU is needed. Training does this work ahead, in the loader's thread.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from megatron_longctx.core.attention.execute import Pass, Runtime
from megatron_longctx.core.attention.function import shapes_of
from megatron_longctx.core.comm import BufferPool
from megatron_longctx.core.comm.peer import SymmetricExchange
from megatron_longctx.core.errors import refuse
from megatron_longctx.core.kernels import PROVIDERS
from megatron_longctx.core.plans import KernelSupport, Recorder, Target, backward_plan, build_plan
from megatron_longctx.core.plans.mask import documents

from .cases import packs
from .report import Report, check_least, table

PHASES = ("layout and plan", "backward plan", "send layouts", "passes")
_WARM_UP = 2
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pack", default="24", help="a name in analysis/benchmarks/cases.py (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--schedules", default="all_gather,zigzag,ring,ulysses", help="(default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=20, help="new batches per schedule (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write JSON and a Markdown table."""
    if arguments.pack not in packs():
        raise refuse("--pack", arguments.pack, "one of " + ", ".join(packs()), "Choose one of these.")
    check_least("--ranks", arguments.ranks)
    check_least("--iterations", arguments.iterations)
    n, lengths = arguments.ranks, packs()[arguments.pack]
    cores, load = os.cpu_count(), os.getloadavg()[0]  # other processes make a core's time longer too
    measured, medians = {}, {}
    for schedule in arguments.schedules.split(","):
        batches = list(milliseconds(schedule, n, lengths, _WARM_UP + arguments.iterations))[_WARM_UP:]
        phases = measured[schedule] = [list(phase) for phase in zip(*batches, strict=True)]
        medians[schedule] = [*map(statistics.median, phases), statistics.median(map(sum, batches))]
    rows = [[schedule, *(f"{each:.1f}" for each in times)] for schedule, times in medians.items()]
    pack = f"{len(lengths)} documents in {sum(lengths):,} tokens"
    about = f"{pack}, {n} ranks, {arguments.iterations} batches of each mode, {cores} cores, load {load:.1f}"
    what = "milliseconds of one core's time, by mode and phase, of each batch"
    report = Report(arguments.out, "cpu", what, about, "medians of one core's milliseconds")
    sizes = {"pack": arguments.pack, "ranks": n, "cores": cores, "load_average": load}
    named = {schedule: dict(zip((*PHASES, "sum"), times, strict=True)) for schedule, times in medians.items()}
    data = {**sizes, "phases": PHASES, "medians": named, "milliseconds": measured}
    print(report.write(data, table(["mode", *PHASES, "sum"], rows)))


def milliseconds(schedule: str, n: int, lengths: tuple[int, ...], batches: int) -> Iterator[list[float]]:
    """Yield, for every batch, the times of all phases on a rank in the middle, which reads its peers' memory.

    All batches have the same documents in different orders, so that nothing of an earlier batch can be reused.
    """
    q, kv = (torch.empty(0, 1, heads, _HEAD_DIM, dtype=torch.bfloat16) for heads in (_HEADS, _KV_HEADS))
    shapes = shapes_of(q, kv, kv)
    target = Target(shapes.workload, KernelSupport(packed=True, rectangles=True, windows=True), over_peers=True)
    peers: Any = SimpleNamespace(over_peers=True)
    peers.channel = lambda recording, num_bytes, _: SymmetricExchange(peers, recording, num_bytes)
    runtime = Runtime(PROVIDERS["cpu"](deterministic=False), peers, BufferPool(torch.device("cpu")))
    draw = random.Random(0)
    for _ in range(batches):
        times = [time.thread_time()]
        plan = build_plan(schedule, n, documents(draw.sample(lengths, len(lengths))))
        times.append(time.thread_time())
        backward = backward_plan(plan)
        times.append(time.thread_time())
        recorders = [Recorder(plan, target), Recorder(backward, target)]
        for recorder in recorders:
            recorder.send_bytes()
        times.append(time.thread_time())
        for recorder in recorders:
            Pass(recorder, n // 2, shapes, runtime)
        times.append(time.thread_time())
        yield [1e3 * (after - before) for before, after in pairwise(times)]
