"""Context Parallelism for Scalable Million-Token Inference (2024).

Times to the first token of Llama 3 405B by nodes, networks and modes, compared with tensor parallelism; the rules that
choose a mode; attention of decode.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from analysis.benchmarks.fit import Coefficients, Prompt, fit, prompts, score, slower
from megatron_longctx.core.plans.plan import ALL_HEADS
from megatron_longctx.planner.cost import GIB, attention_flops

from . import decoding, tensor_parallel
from .cp_inference_rules import RuleInputs, algorithm_1, algorithm_5
from .nodes import ATTENTION_TFLOPS, HEADS, LAYERS, RDMA, TCP, TP, WEIGHTS, Times, batch, cluster, costs, first_token
from .page import Assumption, Cell, Proof, Results, Table, cell, numbers, paper, proofs, recorded, sensitivity

PRINTED: Coefficients = (-1.059, 1.145, 12.112)
TABLE_4 = (
    (126720, 1280, 1023.39, 898.71), (124800, 3200, 1110.18, 1046.43), (123840, 4160, 1298.92, 1280.1),
    (121600, 6400, 1305.56, 1302.01), (115200, 12800, 2080.67, 2205.27), (102400, 25600, 3353.02, 3617.02),
    (89600, 38400, 4629.23, 4922.52), (76800, 51200, 5745.08, 6217.83), (64000, 64000, 6845.21, 7367.99),
    (51200, 76800, 7890.35, 8468.66), (38400, 89600, 8697.27, 9666.62), (25600, 102400, 10105.78, 10652.39),
    (12800, 115200, 11136.4, 11571.62), (0, 128000, 11462.15, 12360.57),
)  # fmt: skip
"""Cached tokens, new tokens, and milliseconds of pass-KV and of pass-Q."""


def make(arguments: argparse.Namespace) -> Results:
    del arguments
    tables = (
        *(table_4(), table_5(), nodes(), tensor_parallel.table_7(), decoding.table_8(), decoding.forms()),
        *(long_contexts(), rules(), thresholds(), fits()),
        *(sensitivity(assumed()), proofs(proved())),
    )
    return Results(tables, facts(tables))


def table_4() -> Table:
    rows: list[list[Cell]] = []
    for cached, new, kv, q in TABLE_4:
        ours = [first_token(4, new, cached, mode) for mode in ("pass_kv", "pass_q", "one_hop")]
        rows.append([
            f"{new / (new + cached):.2%}", cell(1e3 * ours[0], "d", 0), paper(kv, 0), cell(1e3 * ours[1], "d", 0),
            paper(q, 0), cell(1e3 * ours[2], "d", 0), cell(ours[0] / ours[1], "d", 3), paper(kv / q, 3),
        ])  # fmt: skip
    columns = ["miss rate", "pass_kv, ms", "paper", "pass_q, ms", "paper", "one_hop, ms", "pass_kv / pass_q", "paper"]
    return Table("misses", "what travels, by miss rate", columns, rows, ["table 4", "figure 9"])


def table_5() -> Table:
    theirs = {3200: ((627, 414, None), (166, 414, 424)), 12800: ((631, 1608, None), (544, 1608, 1023))}
    rows: list[list[Cell]] = []
    for new in theirs:
        local, keys = new / 4, 128000 / 4
        work = attention_flops(HEADS, local * keys, ALL_HEADS, False) / (ATTENTION_TFLOPS * 1e12)
        query, kv = local * 16 * 128 * 2, keys * 2 * 128 * 2
        sent = {"pass_kv": (kv, None), "pass_q": (query, 3 * (query + local * 16 * 4))}
        for mode, (size, results), (send, attend, exchange) in zip(sent, sent.values(), theirs[new], strict=True):
            times = [1e6 * each / (RDMA * GIB) if each else None for each in (size, results)]
            rows.append([
                f"{new / 128000:.1%}", mode, cell(times[0], "f", 0), paper(send, 0), cell(1e6 * work, "f", 0),
                paper(attend, 0), cell(times[1], "f", 0), paper(exchange, 0),
            ])  # fmt: skip
    columns = ["miss rate", "", "hop's message, µs", "paper", "its attention, µs", "paper", "results home, µs", "paper"]
    return Table("parts", "what a hop takes", columns, rows, ["table 5"])


def nodes() -> Table:
    theirs = {(8, 1): 1.740, (8, 2): 0.999, (32, 1): 7.658, (32, 2): 4.015, (128, 1): 42.010, (128, 2): 21.042}
    theirs |= {(128, 4): 10.950, (128, 8): 5.85, (128, 16): 3.8}
    rows: list[list[Cell]] = []
    for length in (8, 32, 128):
        for n in (1, 2, 4, 8, 16):
            tokens = length * 1000
            ours = [first_token(n, tokens, gibps=rate) for rate in (RDMA, TCP)]
            one = first_token(1, tokens)
            figures = (cell(ours[0], "d"), paper(theirs.get((length, n))), cell(one / ours[0], "d"), cell(ours[1], "d"))
            known = theirs.get((length, n))
            rows.append([f"{length}K", str(n), *figures, paper(theirs[length, 1] / known if known else None)])
    columns = ["tokens", "nodes", "RDMA, s", "paper", "times one node", "TCP, s", "paper, times one node"]
    of = ["table 6", "table 7", "figure 6", "figure 7"]
    return Table("nodes", "first tokens by nodes and network", columns, rows, of)


def long_contexts() -> Table:
    theirs = {(128, 8): 5.85, (128, 16): 3.8, (1000, 16): 77.0}
    rows: list[list[Cell]] = []
    for length in (128, 256, 512, 1000):
        for n in (8, 16):
            ours = [first_token(n, length * 1000, gibps=rate) for rate in (RDMA, TCP)]
            flops = (
                2 * WEIGHTS * length * 1e3
                + LAYERS * attention_flops(HEADS, (length * 1e3) ** 2 / 2, ALL_HEADS, False) * TP
            )
            rate = flops / (n * TP) / ours[0] / 1e12
            them = 502 if (length, n) == (1000, 16) else None
            figures = (cell(ours[0], "d", 1), paper(theirs.get((length, n)), 1), cell(ours[1], "d", 1))
            rows.append([f"{length}K", str(n), *figures, cell(rate, "d", 0), paper(them, 0)])
    columns = ["tokens", "nodes", "RDMA, s", "paper", "TCP, s", "TFLOP/s per GPU", "paper"]
    return Table("long", "up to a million tokens", columns, rows, ["figure 8"])


def rules() -> Table:
    inputs = RuleInputs(HEADS, cluster(4, RDMA), costs())
    ours = fit([Prompt(new, cached, kv, q) for cached, new, kv, q in TABLE_4])
    rows: list[list[Cell]] = []
    for cached, new, kv, q in TABLE_4:
        prompt = Prompt(new, cached, kv, q)
        first, fifth = (rule(new, cached, 4, inputs) for rule in (algorithm_1, algorithm_5))
        simulated = first_token(4, new, cached) < first_token(4, new, cached, "pass_q")
        taken = (first, fifth, score(prompt, PRINTED) > 0, score(prompt, ours) > 0, simulated)
        rows.append(
            [f"{new / (new + cached):.2%}", "KV" if kv < q else "Q", *("KV" if each else "Q" for each in taken)]
        )
    right: list[Cell] = [cell(sum(row[at] == row[1] for row in rows), "f", 0) for at in range(2, 7)]
    rows.append(["right, of 14", "", *right])
    columns = [
        "miss rate", "faster", "algorithm 1", "algorithm 5", "empirical, printed", "empirical, fitted", "simulate",
    ]  # fmt: skip
    return Table("rules", "what the rules take for the paper's prompts", columns, rows, ["figure 10"])


def thresholds() -> Table:
    rows: list[list[Cell]] = []
    for name, gibps in (("RDMA", RDMA), ("TCP", TCP)):
        for n in (2, 4, 8, 16):
            rate = ATTENTION_TFLOPS * 1e12 / (gibps * GIB)
            rows.append([name, str(n), cell(n * rate * 2 / 2 / 16, "f", 0), cell(n * rate * 2 / 4, "f", 0)])
    columns = ["network", "nodes", "new tokens from which keys hide (2)", "tokens from which queries hide (3)"]
    return Table("thresholds", "equations 2 and 3", columns, rows, ["equation 2", "equation 3"])


def fits() -> Table:
    """Fit the empirical rule to this project's own prompts, by ranks and transport."""
    rows: list[list[Cell]] = []
    peers, nccl = recorded("inference_transports_h200_x4")["parts"][:2]
    rows_of_two = recorded("inference_rows_h200")
    for name, data, ranks in (("4, peer memory", peers, 4), ("4, NCCL", nccl, 4), ("2, peer memory", rows_of_two, 2)):
        measured = prompts(data, ranks)
        own = fit(measured)
        costs_of = [max(slower(p, by) for p in measured) for by in (own, PRINTED)]
        lost = [cell(100 * x, "m", 1) for x in costs_of]
        rows.append([name, str(len(measured)), *(cell(x, "m", 3) for x in own), *lost])
    columns = ["ranks", "prompts", "alpha", "beta", "gamma", "most lost, %", "by the printed ones"]
    return Table("fits", "the empirical rule fitted on H200s", columns, rows)


def assumed() -> Iterator[Assumption]:
    """Yield what the headlines depend on."""
    names = {
        "kernel": "the paper's kernel, 540 TFLOP/s",
        "network": "the paper's network, 24.3 GiB/s",
        "one_node": "the paper's one-node time, 42.01 s",
        "overhead": "20 µs a call, 80 µs a step, 10 µs a message",
    }
    for headline, value in (
        ("a million tokens on 16 nodes, s", _million),
        ("pass_kv / pass_q, 2.5% misses", _kv_over_q),
    ):
        for key, name in names.items():
            yield Assumption(name, headline, partial(value, key))


def _million(key: str, by: float) -> float:
    return first_token(16, 10**6, times=Times(**{key: by}))


def _kv_over_q(key: str, by: float) -> float:
    kv, q = (first_token(4, 3200, 124800, mode, times=Times(**{key: by})) for mode in ("pass_kv", "pass_q"))
    return kv / q


def proved() -> Iterator[Proof]:
    """Yield the plans of tables 4 and 8 and of figure 8."""
    for new, cached in ((1280, 126720), (12800, 115200), (128000, 0)):
        for mode in ("pass_kv", "pass_q", "one_hop"):
            yield Proof(mode, f"{new:,} new" + f", {cached:,} cached" * (cached > 0), batch(4, new, cached).plan(mode))
    for n, new in ((8, 128000), (16, 128000), (16, 1000000)):
        yield Proof("pass_kv", f"{new:,} new", batch(n, new, 0).plan("pass_kv"))
    for n, sequences in ((4, 1), (4, 4), (8, 4)):
        for mode in ("pass_q", "one_hop"):
            plan = batch(n, 1, 127999, sequences).plan(mode)
            yield Proof(mode, f"1 new, 127,999 cached; {sequences} sequence{'s' * (sequences > 1)}", plan)


def facts(tables: Sequence[Table]) -> dict[str, float]:
    """Return the numbers in the claims."""
    of = {table.key: table for table in tables}
    half = of["misses"].rows[5:]
    pairs = [(row[1], row[2]) for row in half] + [(row[3], row[4]) for row in half]
    off = [a["value"] / b["value"] - 1 for a, b in pairs if isinstance(a, dict) and isinstance(b, dict)]
    right = of["rules"].rows[-1]
    correct = [float(each["value"]) for each in right if isinstance(each, dict)]
    gaps = [(row[1] - row[0]) / 1e3 for row in numbers(of["misses"])]
    million = [row[i] for row in numbers(of["sensitivity"])[:4] for i in (0, 2)]
    return {
        "gap_least": min(gaps),
        "gap_most": max(gaps),
        "million_share": 100 * of["long"].value("1000K", "16", column=5) / ATTENTION_TFLOPS,
        "million_least": min(million),
        "million_most": max(million),
        "table_4_off": 100 * max(map(abs, off)),
        "million": of["long"].value("1000K", "16", column=2),
        "million_rate": of["long"].value("1000K", "16", column=5),
        "short": of["long"].value("128K", "16", column=2),
        "two": of["nodes"].value("128K", "2", column=4),
        "four": of["nodes"].value("128K", "4", column=4),
        "eight": of["nodes"].value("128K", "8", column=4),
        "sixteen": of["nodes"].value("128K", "16", column=4),
        "tcp_four": of["nodes"].value("128K", "4", column=5),
        "rdma_four": of["nodes"].value("128K", "4", column=2),
        **dict(zip(("right_1", "right_5", "right_printed", "right_fitted", "right_simulated"), correct, strict=True)),
        **{f"tp_{n}": of["tensor"].value(str(n), column=3) for n in (2, 4, 8)},
        **{f"tp_{n}_cp": of["tensor"].value(str(n), column=6) for n in (2, 4, 8)},
        **{
            f"tp_{n}_off": 100 * abs(of["tensor"].value(str(n), column=3) / of["tensor"].value(str(n), column=4) - 1)
            for n in (2, 4)
        },
        "tp_sums": 100 * of["tensor"].value("4", column=5) / of["tensor"].value("4", column=3),
        **decoding.facts(of["decode"], of["forms"]),
        "lost": max(of["fits"].value(str(row[0]), column=5) for row in of["fits"].rows),
        "lost_printed": max(of["fits"].value(str(row[0]), column=6) for row in of["fits"].rows),
    }
