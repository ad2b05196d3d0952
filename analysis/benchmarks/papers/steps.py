"""Steps of DistFlashAttn's schedule on A100s, compared with Megatron-LM, RSA and DeepSpeed-Ulysses (tables 1 to 4).

All are simulated from data sheets.
"""

from dataclasses import replace
from statistics import fmean

from megatron_longctx.config.cluster import load_cluster
from megatron_longctx.core.plans import Mode, Workload
from megatron_longctx.core.plans.modes.helper import Helper
from megatron_longctx.planner.cost import GIB, Costs

from .page import Cell, Table, cell, paper
from .simulated import LLAMA_7B, LLAMA_33H, LLAMA_GQA, MATMUL_SHARE, Llama, Machine, one_rank, passes, scaled

PRINTED = Helper(shares=False)
"""Algorithm 2 as the paper prints it."""
_K = 1024


def a100s(n: int, what: str = "kernels", by: float = 1.0) -> Machine:
    """Return A100s of one or two hosts by their data sheets, with one assumed figure `by` times as large.

    Every GPU has 100 Gb/s between hosts. With 100 Gb/s for a whole host, a step of table 1 would take four times as
    long as the paper measured.
    """
    cluster = load_cluster("a100_2x8").resized(n)
    if cluster.network is not None:
        cluster = replace(cluster, network=replace(cluster.network, nics=cluster.ranks_per_node))
    if what == "matrix products":
        return Machine(cluster, Costs.of_cluster(cluster), matmul_share=by * MATMUL_SHARE)
    cluster = scaled(cluster, what, by)
    return Machine(cluster, Costs.of_cluster(cluster))


def step(
    model: Llama, n: int, length: int, mode: Mode | str = PRINTED, *, again: bool = False, on: Machine | None = None
) -> float:
    """Return the seconds of a training step of a sequence over n ranks; with `again`, backward repeats attention."""
    machine = on or a100s(n)
    simulated = passes(mode, machine, model.workload, length)
    attention = simulated.seconds + (simulated.forward.seconds if again else 0.0)
    return model.layers * (attention + _linear(model, length / n, machine))


def padded(model: Llama, n: int) -> Llama:
    """Return the model with dummy heads, so that n divides the heads."""
    heads = -(-model.heads // n) * n
    return replace(model, heads=heads, kv_heads=heads if model.kv_heads == model.heads else model.kv_heads)


def ulysses_step(model: Llama, n: int, length: int, *, again: bool = True) -> float:
    """Return the seconds of the same step with DeepSpeed-Ulysses, which shards heads."""
    return step(padded(model, n), n, length, "ulysses", again=again)


def megatron_step(model: Llama, n: int, length: int, on: Machine | None = None) -> float:
    """Return the seconds of the same step with tensor and sequence parallelism; backward repeats whole layers."""
    machine, share = on or a100s(n), padded(model, n)
    alone = one_rank(machine, Workload(share.heads // n, 1, model.head_dim), length)
    cluster = machine.cluster
    inside = cluster.route(0, 1).gibps
    across = (
        inside if cluster.network is None or cluster.nodes == 1 else cluster.network.nics * cluster.network.nic_gibps
    )
    exchanged = 14 * length / n * model.hidden * 2 * (n - 1)
    attention = 2 * alone.forward.seconds + alone.backward.seconds
    return model.layers * (attention + _linear(share, length / n, machine) + exchanged / (min(inside, across) * GIB))


def pipelined(seconds: float, stages: int) -> float:
    """Return the seconds per sequence of a pipeline with as many micro-batches, of one sequence each, as stages.

    `seconds` is the time of one sequence on all stages. The last stage waits for stages - 1 shares of it.
    """
    return (2 * stages - 1) / stages * seconds / stages


def _linear(model: Llama, tokens: float, machine: Machine) -> float:
    """Return the seconds of one layer's matrix products outside attention: forward twice, and backward."""
    peak = machine.cluster.device.peak_tflops
    assert peak is not None
    return 4 * model.linear_flops(int(tokens)) / (machine.matmul_share * peak * 1e12)


def faster_than_megatron(what: str, by: float) -> float:
    """Return the mean speed-up of table 1's LLaMA-7B with one assumed figure `by` times as large."""
    machines = {n: a100s(n, what, by) for n in (8, 16)}
    cases = [(n, n * tokens * _K, on) for n, on in machines.items() for tokens in (8, 16, 32)]
    return fmean(megatron_step(LLAMA_7B, *each) / step(LLAMA_7B, *each[:2], on=each[2]) for each in cases)


def table_1() -> Table:
    theirs = {
        ("LLaMA-7B", 8): ((6.81, 5.98), (20.93, 17.26), (72.75, 58.46)),
        ("LLaMA-GQA", 8): ((6.60, 5.61), (20.53, 16.86), (71.93, 57.01)),
        ("LLaMA-33H", 8): ((8.37, 6.08), (25.75, 17.77), (90.21, 59.96)),
        ("LLaMA-7B", 16): ((14.26, 12.75), (43.44, 30.21), (147.06, 106.37)),
        ("LLaMA-GQA", 16): ((14.21, 9.74), (43.20, 28.49), (146.38, 102.34)),
        ("LLaMA-33H", 16): ((20.63, 13.12), (62.78, 31.33), (216.70, 107.76)),
    }
    rows: list[list[Cell]] = []
    for n in (8, 16):
        for name, model in (("LLaMA-7B", LLAMA_7B), ("LLaMA-GQA", LLAMA_GQA), ("LLaMA-33H", LLAMA_33H)):
            for i, each in enumerate((8, 16, 32)):
                length = each * _K * n
                ours, megatron = step(model, n, length), megatron_step(model, n, length)
                them, us = theirs[name, n][i]
                rows.append([
                    *(str(n), name, f"{each}K"), cell(ours, "d"), paper(us), cell(megatron, "d"), paper(them),
                    cell(megatron / ours, "d"), paper(them / us),
                ])  # fmt: skip
    columns = [
        "GPUs", "model", "tokens per GPU", "helper, s", "paper", "Megatron TP + SP, s", "paper", "speed-up", "paper",
    ]  # fmt: skip
    return Table("steps", "whole steps beside Megatron's tensor parallelism", columns, rows, ["table 1"])


def few_heads(heads: int) -> Llama:
    """Return LLaMA-16H to LLaMA-2H: as many heads in total as LLaMA-7B, in more and narrower layers with its FFN."""
    layers = LLAMA_7B.layers * LLAMA_7B.heads // heads
    return Llama(layers, heads * Llama.head_dim, LLAMA_7B.ffn, heads, heads)


def table_2() -> Table:
    """Compare the seconds per sequence on all 16 GPUs, and the tokens per GPU and layer."""
    n = 16
    rows: list[list[Cell]] = []
    for tokens in (128, 512):
        for heads in (16, 8, 4, 2):
            model, rest = few_heads(heads), n // heads
            ours, alone = step(model, n, tokens * _K), megatron_step(model, heads, tokens * _K)
            copies, stages = alone / rest, pipelined(alone, rest)
            rows.append([
                f"LLaMA-{heads}H", f"{tokens}K", *(cell(each, "d") for each in (ours, alone, copies, stages)),
                cell(copies / ours, "d"), cell(stages / ours, "d"), cell(rest, "f", 0),
            ])  # fmt: skip
    columns = [
        "model", "tokens", "helper, s", "Megatron TP, one sequence, s", "TP x DP, s per sequence",
        "TP x PP, s per sequence", "speed-up, DP", "speed-up, PP", "tokens a GPU holds, of helper's",
    ]  # fmt: skip
    return Table("heads", "fewer heads than GPUs", columns, rows, ["table 2"])


def table_3() -> Table:
    theirs = {8: (32, 2.50, 14.10), 16: (64, 6.85, 30.49)}
    rows: list[list[Cell]] = []
    for n, (tokens, us, them) in theirs.items():
        length = tokens * _K
        scores = LLAMA_7B.heads * length / n * length * 2 / GIB
        ours = step(LLAMA_7B, n, length)
        figures = (cell(ours, "d"), paper(us), paper(them), paper(them / us), cell(scores, "f", 0))
        rows.append([str(n), f"{tokens}K", *figures])
    columns = ["GPUs", "tokens", "helper, s", "paper", "paper, RSA", "paper, speed-up", "RSA's scores of a layer, GiB"]
    return Table("rsa", "steps at the longest sequences of Ring Self-Attention", columns, rows, ["table 3"])


def table_4() -> Table:
    theirs = {
        "LLaMA-7B": ((37.53, 30.21, 1.21), (134.09, 106.37, 1.26)),
        "LLaMA-33H": ((56.63, 31.33, 1.81), (202.89, 107.76, 1.88)),
    }
    n = 16
    rows: list[list[Cell]] = []
    for name, model in (("LLaMA-7B", LLAMA_7B), ("LLaMA-33H", LLAMA_33H)):
        for each, (them, us, faster) in zip((16, 32), theirs[name], strict=True):
            length = each * _K * n
            ours = step(model, n, length)
            again, once = (ulysses_step(model, n, length, again=flag) for flag in (True, False))
            rows.append([
                *(name, f"{each}K", cell(ours, "d"), paper(us), cell(again, "d"), paper(them)),
                *(cell(again / ours, "d"), paper(faster), cell(once, "d")),
            ])  # fmt: skip
    columns = [
        "model", "tokens per GPU", "helper, s", "paper", "Ulysses, s", "paper", "speed-up", "paper",
        "Ulysses, attention kept, s",
    ]  # fmt: skip
    return Table("ulysses", "whole steps beside DeepSpeed-Ulysses", columns, rows, ["table 4"])
