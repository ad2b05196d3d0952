"""DistFlashAttn (Li et al. 2024): volumes, balance, overlap, checkpoints, and limits of the balanced schedule."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron_longctx.core.plans import Mode, Workload, backward_plan, build_plan
from megatron_longctx.core.plans.modes.helper import Helper

from .page import Assumption, Cell, Proof, Results, Table, cell, numbers, paper, proofs, recorded, sensitivity
from .simulated import LLAMA_7B, Machine, moved, not_overlapped, one_rank, passes
from .steps import PRINTED, a100s, faster_than_megatron, step, table_1, table_2, table_3, table_4

_MHA, _GQA = Workload(32, 32, 128), Workload(32, 8, 128)
_K = 1024
MODES: tuple[Mode | str, ...] = ("ring", PRINTED, Helper(), "zigzag", "striped", "tasp", "all_gather", "ulysses")


def make(arguments: argparse.Namespace) -> Results:
    del arguments
    tables = (
        *(table_1(), table_2(), table_3(), table_4(), table_5()),
        *(
            figure_4_left(),
            figure_4_right(),
            overlap_measured(),
            overlap_on_gpus(),
            appendix_d(),
            helpers(),
            where_helpers_win(),
        ),
        sensitivity(assumed()),
        proofs(proved()),
    )
    return Results(tables, facts(tables))


def appendix_d() -> Table:
    """Count the elements that all ranks send, in units of an all-gather of the hidden states."""
    rows: list[list[Cell]] = []
    tokens, n = 8 * 2048, 8
    for mode in MODES:
        row: list[Cell] = [str(mode)]
        for workload in (_MHA, _GQA):
            plan = build_plan(mode, n, tokens)
            unit = (n - 1) * tokens * workload.num_heads * workload.head_dim
            ways = [moved(each, workload) / unit for each in (plan, backward_plan(plan))]
            row += [cell(each, "p") for each in (*ways, sum(ways))]
        rows.append(row)
    none: list[Cell] = [None] * 3
    rows.append(["the paper, DistFlashAttn", *(paper(x, 0) for x in (1, 2, 3)), *none])
    rows.append(["the paper, Megatron-LM with recomputation", None, None, paper(14, 0), *none])
    columns = ["mode", *(f"{heads} {way}" for heads in ("32:32", "32:8") for way in ("forward", "backward", "both"))]
    return Table("volumes", "volumes of every mode", columns, rows, ["appendix D"])


def figure_4_left() -> Table:
    rows: list[list[Cell]] = []
    theirs = {(8, "ring"): 4.5, (8, "helper (shares=False)"): 7.5}
    for n in (4, 8, 16):
        machine = a100s(n)
        length = 32 * _K * n
        alone = one_rank(machine, _MHA, length)
        for mode in ("ring", PRINTED, Helper(), "zigzag"):
            simulated = passes(mode, machine, _MHA, length)
            rows.append([
                *(str(n), str(mode)),
                cell(alone.forward.seconds / simulated.forward.seconds, "d"),
                cell(alone.backward.seconds / simulated.backward.seconds, "d"),
                cell(_bound(str(mode), n), "f"),
                paper(theirs.get((n, str(mode))), 1),
            ])  # fmt: skip
    rows += _measured_balance()
    columns = ["ranks", "mode", "forward", "backward", "the schedule's own limit", "paper, forward"]
    return Table("balance", "balanced against unbalanced", columns, rows, ["figure 4 left"])


def _bound(mode: str, n: int) -> float:
    """Return the speed-up that the steps of a schedule allow."""
    whole, own = n * n / 2, 0.5
    steps = {"ring": own + n - 1, str(PRINTED): own + n // 2}
    return whole / steps.get(mode, whole / n)


def _measured_balance() -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    machine = Machine.measured()
    alone = one_rank(machine, _MHA, 128 * _K)
    for mode in ("ring", PRINTED, Helper(), "zigzag"):
        simulated = passes(mode, machine, _MHA, 128 * _K)
        ways = [(alone.forward, simulated.forward), (alone.backward, simulated.backward)]
        cells = [cell(one.seconds / all_.seconds, "s") for one, all_ in ways]
        rows.append(["4 H200s", str(mode), *cells, cell(_bound(str(mode), 4), "f"), None])
    over_nccl = measured("32:32", 131072)
    for name in ("ring", "helper", "zigzag"):
        one = over_nccl["one device, equal FLOPs"]
        ways_of = [4 * one[way] / over_nccl[name][way] for way in ("forward_s", "backward_s")]
        label = f"{name} over NCCL" + (", as printed" if name == "helper" else "")
        limit = cell(_bound(str(PRINTED) if name == "helper" else name, 4), "f")
        rows.append(["4 H200s", label, *(cell(each, "m") for each in ways_of), limit, None])
    return rows


def measured(heads: str, length: int) -> dict[str, dict[str, float]]:
    """Return measurements of attention over NCCL on 4 H200s by mode; one device computes a fourth of the FLOPs."""
    measurements = recorded("papers_measured_h200_x4")["measurements"]
    return {m["name"]: m for m in measurements if (m["heads"], m["length"]) == (heads, length)}


def measured_ratios() -> dict[str, float]:
    """Return what recorded passes on GPUs say of claims: the ring's time over `helper`'s, and `ulysses`'s over
    `zigzag`'s for short and for long sequences."""
    modes = {(m["name"], m["length"]): m["seconds"] for m in recorded("attention_modes_h200_x2")["measurements"]}
    ring = [modes["ring", length] / modes["helper", length] for length in (64 * _K, 128 * _K)]
    found = {"ring_measured_least": min(ring), "ring_measured_most": max(ring)}
    peers = [
        m
        for m in recorded("attention_peers_h200_x4")["measurements"]
        if m["name"] in ("ulysses", "zigzag") and m["forward_s"]
    ]
    times = {(m["length"], m["heads"], m["commit"], m["name"]): m["forward_s"] + m["backward_s"] for m in peers}
    for name, lengths in (("short", (16 * _K, 32 * _K)), ("long", (64 * _K, 128 * _K, 256 * _K))):
        ratios = [times[*key, "ulysses"] / times[*key, "zigzag"] for *key, mode in times
                  if mode == "zigzag" and key[0] in lengths and (*key, "ulysses") in times]  # fmt: skip
        found |= {f"ulysses_{name}_least": min(ratios), f"ulysses_{name}_most": max(ratios)}
    return found


def helpers() -> Table:
    rows: list[list[Cell]] = []
    machine = Machine.measured()
    measurements = recorded("attention_peers_h200_x4")["measurements"]
    peers = {(m["name"], m["heads"], m["length"]): m["percent_of_one_device"] for m in measurements}
    for length in (64 * _K, 128 * _K):
        for heads, workload in (("32:8", _GQA), ("32:32", _MHA)):
            alone = one_rank(machine, workload, length)
            over_nccl = measured(heads, length)
            for mode in (PRINTED, Helper(), "zigzag", "all_gather"):
                simulated = passes(mode, machine, workload, length)
                shares = [
                    25 * one.seconds / all_.seconds
                    for one, all_ in ((alone.forward, simulated.forward), (alone.backward, simulated.backward))
                ]
                name = "helper" if mode is PRINTED else str(mode)
                old = over_nccl[name]["percent_of_one_device"] if mode != Helper() else None
                now = peers.get((str(mode), heads, length))
                rows.append([
                    *(f"{length // _K}K", heads, str(mode)), *(cell(each, "s", 1) for each in shares),
                    cell(25 * alone.seconds / simulated.seconds, "s", 1), cell(now, "m", 1), cell(old, "m", 1),
                ])  # fmt: skip
    columns = ["tokens", "heads", "mode", "forward, %", "backward, %", "both, %", "the same", "over NCCL, both, %"]
    return Table("helpers", "what makes `helper` lose, and the cure", columns, rows)


def figure_4_right() -> Table:
    rows: list[list[Cell]] = []
    theirs = {128: (105, 44)}
    machine = a100s(16)
    network = machine.cluster.network
    assert network is not None
    free = replace(machine, cluster=replace(machine.cluster, network=replace(network, nic_gibps=1e6)))
    for length in (32, 64, 128, 256, 512):
        forward, ideal = (passes(PRINTED, each, _MHA, length * _K).forward for each in (machine, free))
        work = max(ideal.compute_s)
        on, off = 100 * (forward.seconds / work - 1), 100 * (not_overlapped(forward) / work - 1)
        rows.append([f"{length}K", cell(off, "d", 0), cell(on, "d", 0), cell((100 + off) / (100 + on), "d"),
                     *(paper(x, 0) for x in theirs.get(length, (None, None)))])  # fmt: skip
    columns = ["tokens", "not overlapped, %", "overlapped, %", "times as fast", "paper, not", "paper, overlapped"]
    return Table("overlap", "overlap on and off", columns, rows, ["figure 4 right"])


def overlap_measured() -> Table:
    """Show passes with and without `attention.overlap`, as recorded by `python -m analysis.network --case overlap`."""
    of = {(each["network"], each["mode"]): each for each in recorded("network_overlap")["measurements"]}
    rows: list[list[Cell]] = []
    for (network, mode), on in of.items():
        if (off := of.get((network, f"{mode}, no overlap"))) is None:
            continue
        row: list[Cell] = [network, mode]
        for way in ("forward_s", "backward_s"):
            row += [cell(each[way], "e") for each in (off, on)] + [cell(off[way] / on[way], "e")]
        rows.append(row)
    ways = [
        f"{way}, {what}"
        for way in ("forward", "backward")
        for what in ("not overlapped, s", "overlapped, s", "times as fast")
    ]
    return Table("overlap_measured", "overlap on and off, measured", ["network", "mode", *ways], rows)


def overlap_on_gpus() -> Table:
    """Show whole steps of attention with and without `attention.overlap` on 2 GPUs."""
    on, off = (
        {(m["length"], m["name"]): m["seconds"] for m in recorded(f"attention_{name}_h100_x2")["measurements"]}
        for name in ("overlap", "no_overlap")
    )
    rows: list[list[Cell]] = [
        [f"{length // _K}K", mode, cell(1e3 * off[length, mode], "m"), cell(1e3 * on[length, mode], "m"),
         cell(off[length, mode] / on[length, mode], "m")]
        for length in (16 * _K, 64 * _K)
        for mode in ("helper", "zigzag", "ring")
    ]  # fmt: skip
    columns = ["tokens", "mode", "not overlapped, ms", "overlapped, ms", "times as fast"]
    return Table("overlap_on_gpus", "overlap on and off, on 2 H100s", columns, rows)


def table_5() -> Table:
    theirs = {1: (0.84, 0.84), 2: (1.29, 1.36), 4: (2.64, 2.50)}
    theirs |= {8: (6.93, 5.98), 16: (21.44, 17.26), 32: (76.38, 58.46)}
    runs = {run["name"]: run["medians"]["perf/step_s"] for run in recorded("llama3_8b_recompute_h200_x4")["runs"]}
    ours = {8: "32k", 16: "64k", 32: "128k"}
    rows: list[list[Cell]] = []
    for each, (plain, better) in theirs.items():
        length = each * 8 * _K
        again, once = (step(LLAMA_7B, 8, length, again=flag) for flag in (True, False))
        name = ours.get(each)
        on_h200s = cell(runs[f"layer_{name}"] / runs[f"attention_output_{name}"], "m") if name else None
        rows.append([
            *(f"{each}K", cell(again, "d"), paper(plain), cell(once, "d"), paper(better)),
            *(cell(again / once, "d"), paper(plain / better), on_h200s),
        ])  # fmt: skip
    columns = [
        "tokens per GPU", "whole layers again, s", "paper", "attention kept, s", "paper", "speed-up", "paper",
        "4 H200s",
    ]  # fmt: skip
    return Table("checkpoints", "checkpoints at the outputs of attention", columns, rows, ["table 5"])


def where_helpers_win() -> Table:
    """Simulate cases in which a balanced schedule might beat a balanced layout."""
    machine = Machine.measured()
    rows: list[list[Cell]] = []
    cases = (
        ("one sequence, any layout, 32:8", _GQA, "auto"),
        ("one sequence, any layout, 32:32", _MHA, "auto"),
        ("tokens must stay contiguous, 32:8", _GQA, "contiguous"),
        ("tokens must stay contiguous, 33:33", Workload(33, 33, 128), "contiguous"),
    )
    modes = ("helper", "zigzag", "all_gather", "ring", "ulysses")
    for about, workload, layout in cases:
        row: list[Cell] = [about]
        for mode in modes:
            if mode == "ulysses" and workload.num_heads % 4:
                row.append("heads do not divide")
                continue
            row.append(cell(1e3 * passes(mode, machine, workload, 128 * _K, layout).seconds, "s", 1))
        rows.append(row)
    return Table("wins", "where helpers win", ["case", *modes], rows)


def assumed() -> Iterator[Assumption]:
    """Yield what steps on A100s depend on."""
    for what, name in (
        ("kernels", "attention kernels reach 60% of the peak"),
        ("matrix products", "matrix products reach 70% of the peak"),
        ("network", "100 Gb/s per GPU between hosts, 92% of it"),
        ("links", "75% of NVLink for all peers together, 56% for one"),
        ("latency", "100 to 105 µs per message"),
        ("memory", "memory at 1,470 GiB/s"),
    ):
        yield Assumption(name, "LLaMA-7B's steps beside Megatron's, mean", partial(faster_than_megatron, what))


def proved() -> Iterator[Proof]:
    """Yield the plans of 32K tokens per rank in every mode of appendix D."""
    for n in (8, 16):
        for mode in MODES:
            plan = build_plan(mode, n, 32 * _K * n)
            yield Proof(str(mode), f"{32 * n}K", plan, backward_plan(plan))


def facts(tables: Sequence[Table]) -> dict[str, float]:
    """Return the numbers in the claims."""
    of = {table.key: table for table in tables}
    printed = str(PRINTED)
    steps, heads, rsa, ulysses = (numbers(of[key]) for key in ("steps", "heads", "rsa", "ulysses"))
    fewer = [row for row in heads if row[6] > 1]
    shares = [("64K", "32:8"), ("64K", "32:32"), ("128K", "32:8"), ("128K", "32:32")]
    ours = [of["helpers"].value(*each, "helper", column=5) for each in shares]
    theirs = [of["helpers"].value(*each, printed, column=5) for each in shares]
    gains = of["overlap_measured"].rows
    measured_gains = [float(each["value"]) for row in gains for each in (row[4], row[7]) if isinstance(each, dict)]
    on_gpus = [float(row[4]["value"]) for row in of["overlap_on_gpus"].rows if isinstance(row[4], dict)]
    tied, apart = "one sequence, any layout, 32:8", "tokens must stay contiguous, 33:33"
    whole = {
        run["name"]: run["medians"]["mean_tokens_per_s"] for run in recorded("training_dense_128k_h200_x2")["runs"]
    }
    return {
        **measured_ratios(),
        "megatron_measured": whole["zigzag"] / whole["tp_sp"],
        "ring_gain": of["balance"].value("8", printed, column=2) / of["balance"].value("8", "ring", column=2),
        "overlap_256": of["overlap"].value("256K", column=2),
        "overlap_512": of["overlap"].value("512K", column=2),
        "overlap_times": of["overlap"].value("128K", column=3),
        "ring": of["balance"].value("8", "ring", column=2),
        "balanced": of["balance"].value("8", printed, column=2),
        "shared": of["balance"].value("8", "helper", column=2),
        "printed_most": max(theirs),
        "ours_least": min(ours),
        "ours_most": max(ours),
        "tied_helper": of["wins"].value(tied, column=1),
        "tied_zigzag": of["wins"].value(tied, column=2),
        "apart_helper": of["wins"].value(apart, column=1),
        "apart_all_gather": of["wins"].value(apart, column=3),
        "forward": of["volumes"].value(printed, column=1),
        "both": of["volumes"].value(printed, column=3),
        "both_shared": of["volumes"].value("helper", column=3),
        "both_ulysses": of["volumes"].value("ulysses", column=3),
        "both_gqa": of["volumes"].value(printed, column=6),
        "both_all_gather_gqa": of["volumes"].value("all_gather", column=6),
        "overlap_off": of["overlap"].value("128K", column=1),
        "overlap_on": of["overlap"].value("128K", column=2),
        "overlap_least": min(measured_gains),
        "overlap_most": max(measured_gains),
        "overlap_gpus_least": min(on_gpus),
        "overlap_gpus_most": max(on_gpus),
        "kept": of["checkpoints"].value("32K", column=5),
        "kept_measured": of["checkpoints"].value("32K", column=7),
        "steps_off": 100 * max(abs(row[0] / row[1] - 1) for row in steps),
        "megatron_off": 100 * max(abs(row[2] / row[3] - 1) for row in steps),
        "gain_least": min(row[4] for row in steps),
        "gain_most": max(row[4] for row in steps),
        "copies_least": min(row[4] for row in fewer),
        "copies_most": max(row[4] for row in fewer),
        "stages_least": min(row[5] for row in fewer),
        "stages_most": max(row[5] for row in fewer),
        "rsa_step": rsa[0][0],
        "rsa_off": 100 * (1 - rsa[0][0] / rsa[0][1]),
        "rsa_step_two": rsa[1][0],
        "rsa_off_two": 100 * (1 - rsa[1][0] / rsa[1][1]),
        "ulysses_least": min(row[4] for row in ulysses),
        "ulysses_most": max(row[4] for row in ulysses),
        "ulysses_off": 100 * max(abs(row[2] / row[3] - 1) for row in ulysses),
        "kept_least": min(row[6] / row[0] for row in ulysses),
        "kept_most": max(row[6] / row[0] for row in ulysses),
    }
