"""TASP (Wang et al. 2025): rings over all links compared with one ring, by cluster, mask and ratio."""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from megatron_longctx.config.cluster import Cluster, load_cluster
from megatron_longctx.config.tasp import Tasp, choose_rings, decompositions
from megatron_longctx.core.plans import (
    KernelSupport,
    Kind,
    Mode,
    ModeOptions,
    Plan,
    Target,
    Workload,
    backward_plan,
    build_plan,
    find_mode,
    sum_in_nodes,
)
from megatron_longctx.core.plans.mask import causal, full
from megatron_longctx.planner.choose_mode import Problem, rank_modes
from megatron_longctx.planner.cost import Costs
from megatron_longctx.planner.simulate import Simulation, simulate

from .page import Assumption, Cell, Proof, Results, Table, cell, paper, proofs, sensitivity
from .simulated import scaled
from .tasp_measured import by_ratio, emulated, measured, sums_emulated

_K = 1024
_HEADS, _HEAD_DIM = 20, 64
LENGTHS, BATCHES = (24, 48, 96, 192, 384), (1, 8, 48)
_LARGE = 8
"""The smallest batch whose messages count as large, like the paper's red points."""
PAPERS = {  # mean and largest speed-up by cluster and mask
    ("H100-1", "full"): (1.05, None), ("H100-1", "causal"): (1.08, 2.31),
    ("MI300X-1", "full"): (1.57, None), ("MI300X-1", "causal"): (1.68, 3.58),
    ("H100-2", "causal"): (1.20, None), ("H100-4", "causal"): (1.20, None),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The speed-ups of a forward pass and of its messages over one ring, whose computation/communication is `ratio`."""

    length: int
    batch: int
    ratio: float
    whole: float
    messages: float


def clusters() -> dict[str, Cluster]:
    h100 = load_cluster("dgx_h100_x4")
    return {
        "MI300X-1": load_cluster("mi300x_x8"),
        "H100-1": load_cluster("dgx_h100_x1"),
        "H100-2": h100.resized(16),
        "H100-4": h100,
    }


def make(arguments: argparse.Namespace) -> Results:
    del arguments
    tables = (
        *(
            table_1(),
            figures_5_and_6(),
            measured(),
            choices(),
            sums(),
            sums_emulated(),
            across_nodes(),
            planning(),
            emulated(),
            by_ratio(),
        ),
        *(sensitivity(assumed()), proofs(proved())),
    )
    return Results(tables, facts(tables))


def cases(name: str, mask: str, rings: int = -1) -> tuple[Case, ...]:
    """Simulate forward passes with the rings of a decomposition, by its index; -1 for the chosen one."""
    return cases_on(clusters()[name], mask, rings)


@cache
def cases_on(cluster: Cluster, mask: str, rings: int = -1) -> tuple[Case, ...]:
    chosen = choose_rings(cluster)[0] if rings < 0 else decompositions(cluster)[rings]
    simulated = []
    for length in LENGTHS:
        for batch in BATCHES:
            one, several = (_pass(mode, cluster, mask, length, batch) for mode in (_baseline(mask), Tasp(chosen.rings)))
            messages = [_messages(each) for each in (one, several)]
            ratio = max(one.compute_s) / messages[0]
            simulated.append(Case(length, batch, ratio, one.seconds / several.seconds, messages[0] / messages[1]))
    return tuple(simulated)


def _baseline(mask: str) -> str:
    return "ring" if mask == "full" else "zigzag"


def _pass(mode: Mode | str, cluster: Cluster, mask: str, length: int, batch: int) -> Simulation:
    plan = build_plan(mode, cluster.n, (full if mask == "full" else causal)(length * _K))
    workload = Workload(_HEADS, _HEADS, _HEAD_DIM, batch)
    return simulate(plan, cluster, Target(workload), Costs.of_cluster(cluster), timeline=True)


def _messages(simulation: Simulation) -> float:
    """Return the message seconds of the rank whose messages take longest."""
    times = [0.0] * simulation.plan.n
    for span in simulation.spans:
        times[span.rank] += (span.lane == "transfer") * (span.stop - span.start)
    return max(times)


def table_1() -> Table:
    rows: list[list[Cell]] = []
    for mask in ("full", "causal"):
        for each in cases("MI300X-1", mask):
            if each.batch == BATCHES[-1]:
                figures = (cell(each.ratio, "d"), cell(each.whole, "d"), cell(each.messages, "d"))
                rows.append([mask, f"{each.length}K", *figures])
    columns = ["mask", "tokens", "computation / communication of one ring", "speed-up", "of messages alone"]
    return Table("ratios", "batches of 48 on 8 MI300X", columns, rows, ["table 1"])


def figures_5_and_6() -> Table:
    rows: list[list[Cell]] = []
    for name in clusters():
        for mask in ("full", "causal"):
            large = [each for each in cases(name, mask) if each.batch >= _LARGE]
            bound = [each.whole for each in large if each.ratio < 1]
            mean, most = PAPERS.get((name, mask), (None, None))
            rows.append([
                *(name, mask, choose_rings(clusters()[name])[0].name),
                *(cell(statistics.fmean(each.whole for each in large), "d"), paper(mean)),
                *(cell(max(each.whole for each in large), "d"), paper(most)),
                cell(max(each.messages for each in large), "d"),
                cell(statistics.fmean(bound), "d") if bound else None,
            ])  # fmt: skip
    columns = [
        "cluster", "mask", "rings", "mean", "paper", "most", "paper", "of messages, most", "mean where ratio < 1",
    ]  # fmt: skip
    return Table("figures", "speed-ups by cluster", columns, rows, ["figure 5", "figure 6"])


def choices() -> Table:
    rows: list[list[Cell]] = []
    theirs = {("H100-2", "K_(8 x 2)"): 1.43, ("H100-2", "(8-K_8-8)_2"): 1.20}
    theirs |= {("H100-4", "K_(8 x 4)"): 1.27, ("H100-4", "(8-K_8-8)_4"): 1.20}
    for name, cluster in clusters().items():
        chosen = choose_rings(cluster)[0].name
        for number, each in enumerate(decompositions(cluster)):
            if number:
                speedups = [case.whole for case in cases(name, "causal", number) if case.batch >= _LARGE]
                figures = (cell(1e3 * each.seconds, "f"), cell(statistics.fmean(speedups), "d"))
                last = (paper(theirs.get((name, each.name))), "taken" if each.name == chosen else "")
                rows.append([name, each.name, str(len(each.rings)), *figures, *last])
    columns = ["cluster", "decomposition", "rings", "ms a GiB", "mean speed-up", "paper", ""]
    return Table("choices", "which decomposition", columns, rows, ["figure 3"])


def sums() -> Table:
    """Simulate Llama 3 8B's heads with partial gradients that are summed inside a node before they cross."""
    h100 = clusters()["H100-2"]
    assert h100.network is not None
    one_nic = replace(h100, network=replace(h100.network, nics=1))
    rows: list[list[Cell]] = []
    for name, cluster in (("H100-2", h100), ("H100-2, one NIC", one_nic), ("A100-2", load_cluster("a100_2x8"))):
        for mode in ("zigzag", "ring", "double_ring", "tasp"):
            for length in (32, 128, 512):
                rows.append([name, mode, f"{length}K", *_summed(mode, cluster, length * _K)])
    columns = [
        "cluster", "mode", "tokens", "MiB of dK, dV that cross", "with sums", "backward, times as fast",
        "forward and backward",
    ]  # fmt: skip
    return Table("sums", "partial dK, dV summed inside a node before they cross", columns, rows)


_ACROSS = ("node_gather", "usp", "double_ring", "tasp", "all_gather", "zigzag")


def across_nodes() -> Table:
    """Simulate Llama 3 8B's heads in the modes that know nodes, and in flat ones."""
    target = Target(Workload(32, 8, 128), KernelSupport(packed=True, rectangles=True, windows=True))
    rows: list[list[Cell]] = []
    for name in ("H100-2", "H100-4"):
        cluster = clusters()[name]
        options = ModeOptions(cluster=cluster)
        for length in (32, 128):
            problem = Problem(cluster.n, causal(length * _K), target, options=options, sum_in_node=None)
            for each in rank_modes(problem, cluster, candidates=[find_mode(m, cluster.n, options) for m in _ACROSS]):
                times = (*each.predicted, each.seconds)
                memory = cell(each.peak_bytes / 2**20, "p", 0)
                rows.append([name, f"{length}K", each.name.split()[0], *(cell(1e3 * s, "d", 1) for s in times), memory])
    columns = ["cluster", "tokens", "mode", "forward, ms", "backward, ms", "both, ms", "memory, MiB"]
    return Table("nodes", "modes across nodes", columns, rows)


def _summed(mode: str, cluster: Cluster, length: int) -> tuple[Cell, ...]:
    workload, node = Workload(32, 8, 128), cluster.ranks_per_node
    target, costs = (
        Target(workload, KernelSupport(packed=True, rectangles=True, windows=True)),
        Costs.of_cluster(cluster),
    )

    def crossing(plan: Plan) -> float:
        moves = (move for step in plan.steps for move in step.moves if move.block.kind is Kind.DKV)
        return (
            sum(
                b.tokens * workload.token_bytes(b.kind, b.heads)
                for b, source, home in moves
                if source // node != home // node
            )
            / 2**20
        )

    plan = build_plan(mode, cluster.n, length, ModeOptions(cluster=cluster))
    plans = (backward_plan(plan), backward_plan(sum_in_nodes(plan, node)))
    forward, plain, less = (simulate(each, cluster, target, costs).seconds for each in (plan, *plans))
    whole = (forward + plain) / (forward + less)
    return *(cell(crossing(each), "p", 0) for each in plans), cell(plain / less, "d"), cell(whole, "d")


def planning() -> Table:
    rows: list[list[Cell]] = []
    for nodes in (1, 2, 4, 8):
        cluster = replace(load_cluster("dgx_h100_x4"), nodes=nodes)
        begin = time.process_time()
        plan = build_plan(Tasp(choose_rings(cluster)[0].rings), cluster.n, 4096 * cluster.n)
        seconds = time.process_time() - begin
        rows.append([str(cluster.n), cell(sum(len(step.moves) for step in plan.steps), "p", 0), cell(seconds, "c", 2)])
    return Table("planning", "what a plan takes to make", ["ranks", "messages", "seconds of one core"], rows)


def forward_and_backward(name: str) -> float:
    """Return the mean speed-up of both passes, causal, over the cases with large messages."""
    cluster, gains = clusters()[name], []
    costs = Costs.of_cluster(cluster)
    for length, batch in itertools.product(LENGTHS, [each for each in BATCHES if each >= _LARGE]):
        target = Target(Workload(_HEADS, _HEADS, _HEAD_DIM, batch))
        plans = [build_plan(mode, cluster.n, length * _K) for mode in ("zigzag", Tasp(choose_rings(cluster)[0].rings))]
        one, several = (
            sum(simulate(each, cluster, target, costs).seconds for each in (plan, backward_plan(plan)))
            for plan in plans
        )
        gains.append(one / several)
    return statistics.fmean(gains)


def assumed() -> Iterator[Assumption]:
    """Yield what the headline depends on."""

    def mean(what: str, by: float) -> float:
        found = cases_on(scaled(clusters()["MI300X-1"], what, by), "causal")
        return statistics.fmean(each.whole for each in found if each.batch >= _LARGE)

    for what, name in (
        ("kernels", "attention kernels reach 40% of the peak"),
        ("links", "80% of each link reach the payload"),
        ("latency", "100 µs per message"),
        ("memory", "memory at 3,820 GiB/s"),
    ):
        yield Assumption(name, "8 MI300X, causal, mean", partial(mean, what))


def proved() -> Iterator[Proof]:
    """Yield the plans of the longest sequences of figures 5 and 6, and of backward passes with sums."""
    for name, cluster in clusters().items():
        rings = Tasp(choose_rings(cluster)[0].rings)
        for mask, shown in (("full", full), ("causal", causal)):
            for mode in (_baseline(mask), rings):
                plan = build_plan(mode, cluster.n, shown(LENGTHS[-1] * _K))
                yield Proof(f"{mode}, {name}", f"{LENGTHS[-1]}K, {mask}", plan, backward_plan(plan))
    h100 = clusters()["H100-2"]
    for each in ("zigzag", "ring", "double_ring", "tasp"):
        plan = sum_in_nodes(build_plan(each, h100.n, 512 * _K, ModeOptions(cluster=h100)), h100.ranks_per_node)
        yield Proof(f"{each}, H100-2, with sums", "512K, causal", plan, backward_plan(plan))


def _column(table: Table, column: int) -> list[float]:
    return [float(number["value"]) for row in table.rows if isinstance(number := row[column], dict)]


def facts(tables: Sequence[Table]) -> dict[str, float]:
    """Return the numbers in the claims."""
    of = {table.key: table for table in tables}
    mesh, h100 = ("MI300X-1", "causal"), ("H100-1", "causal")
    large = [each for name in clusters() for each in cases(name, "causal") if each.batch >= _LARGE]
    both, simulated = (_column(of["by_ratio"], column) for column in (6, 7))
    above = [each.whole for each in large if each.ratio > 1.5]
    return {
        "mesh_mean": of["figures"].value(*mesh, column=3),
        "mesh_most": of["figures"].value(*mesh, column=5),
        "mesh_full": of["figures"].value("MI300X-1", "full", column=3),
        "mesh_lowest": min(number for column in (2, 4) for number in _column(of["sensitivity"], column)),
        "mesh_highest": max(number for column in (2, 4) for number in _column(of["sensitivity"], column)),
        "mesh_both": forward_and_backward("MI300X-1"),
        "h100_messages": of["figures"].value(*h100, column=7),
        "slower_cells": sum(each < 1 for each in _column(of["measured"], 4)),
        "cells": len(of["measured"].rows),
        "slower_least": 100 * (1 / max(_column(of["measured"], 4)) - 1),
        "slower_most": 100 * (1 / min(_column(of["measured"], 4)) - 1),
        "emulated_all_gather": of["emulated"].value("mesh8", "causal", column=4),
        "emulated_ulysses": of["emulated"].value("mesh8", "causal", column=5),
        "mesh_messages": of["figures"].value(*mesh, column=7),
        "h100_mean": of["figures"].value(*h100, column=3),
        "h100_most": of["figures"].value(*h100, column=5),
        "two": of["choices"].value("H100-2", "(8-K_8-8)_2", column=4),
        "two_whole": of["choices"].value("H100-2", "K_(8 x 2)", column=4),
        "four": of["choices"].value("H100-4", "(8-K_8-8)_4", column=4),
        "four_whole": of["choices"].value("H100-4", "K_(8 x 4)", column=4),
        "above_mean": statistics.fmean(above),
        **{f"sum_{mode}": of["sums"].value("H100-2", mode, "32K", column=6) for mode in ("zigzag", "ring", "tasp")},
        "sum_one_nic": of["sums"].value("H100-2, one NIC", "zigzag", "32K", column=6),
        "sum_a100": of["sums"].value("A100-2", "zigzag", "32K", column=6),
        "sum_long": of["sums"].value("A100-2", "zigzag", "512K", column=6),
        "sum_least": min(_column(of["sums_emulated"], 2)),
        "sum_most": max(_column(of["sums_emulated"], 2)),
        "emulated": of["emulated"].value("mesh8", "causal", column=2),
        "by_ratio_most": max(both),
        "by_ratio_least": min(both),
        "by_ratio_right": sum((one > 1) == (predicted > 1) for one, predicted in zip(both, simulated, strict=True)),
        "by_ratio_rows": len(both),
        "planned": of["planning"].value("64", column=2),
    }
