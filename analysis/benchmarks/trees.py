"""Trees of shared beginnings beside the same rollouts as separate packed documents: attention alone, and whole steps.

`ideal` is how many times fewer FLOPs a tree has than its rollouts apart, and `reached` is the share of it by which the
tree is faster. Attention counts visible pairs; a step counts its products with tokens, too. Deep trees are measured
with and without copies of the keys that branches share, whose results are compared before. Contenders of a cell take
turns, and every line is printed as soon as its cell is measured.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_longctx.config.cluster import load_cluster
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.comm import gather_objects
from megatron_longctx.core.plans import (
    Mode,
    ModeOptions,
    Recorder,
    Target,
    backward_plan,
    build_plan,
    find_mode,
    recorder,
)
from megatron_longctx.core.plans import recording as ops
from megatron_longctx.core.plans.kernel_calls import fa4_takes
from megatron_longctx.planner.choose_mode import Problem, choose_mode
from megatron_longctx.training.measure import mean_seconds, training_step
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from . import tree_steps
from .cases import Case
from .measure import Bench, Contender, Prepared, wrong
from .report import Report, add_ranks, check_least, numbers, table
from .rollouts import Rollouts, agents, trees

_MODES = ("zigzag", "all_gather", "helper")
_PARTS = ("attention", "steps")
_COLUMNS = {"ms": ".2f", "tflops": ".0f", "faster": ".2f", "ideal": ".2f", "reached": ".0%", "of_causal": ".0%"}
_SHARED = "tree, keys not copied"
_ROW_S = 0.1
"""Seconds of calls in a row that are timed together."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    trees: their numbers in `trees`. modes: of attention. mode: of whole steps. divide: of all lengths.
    seconds: after these no cell begins.
    """

    parts: tuple[str, ...]
    trees: tuple[int, ...]
    modes: tuple[str, ...]
    mode: str
    heads: tuple[int, int, int]
    divide: int
    rounds: int
    seconds: float
    pack_tokens: int
    cluster: str
    settings: tuple[str, ...]
    began: float = field(default_factory=time.time)

    def late(self, group: dist.ProcessGroup) -> bool:
        """Whether the time is over, on all ranks alike."""
        return max(gather_objects(group, time.time() - self.began)) > self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser)
    parser.add_argument("settings", nargs="*", help="group=NAME and key=value words of the steps' model")
    parser.add_argument("--parts", default=",".join(_PARTS), help="of the measurement (default: %(default)s)")
    parser.add_argument("--trees", default="2,0,1", help="numbers, in order: 16K, 32K, agents (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(_MODES), help="of attention (default: %(default)s)")
    parser.add_argument("--mode", default="all_gather", help="of whole steps (default: %(default)s)")
    parser.add_argument("--heads", default="32:8:128", help="query heads:KV heads:size (default: %(default)s)")
    parser.add_argument("--divide", type=int, default=1, help="divide all lengths by this (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of every contender (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=250, help="no cell begins later (default: %(default)s)")
    parser.add_argument(
        "--pack-tokens", type=int, default=70_000, help="the most tokens of a pack of separate rollouts"
    )
    parser.add_argument("--cluster", default="h200_x8", help="whose figures `auto` uses (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round with an eighth of the tokens")


def run(arguments: argparse.Namespace) -> None:
    """Measure, write JSON and a Markdown table after every cell."""
    for name in ("divide", "rounds"):
        check_least(f"--{name}", getattr(arguments, name))
    ranks = Ranks.of(arguments.ranks, arguments.device)
    divide, rounds = (8 * arguments.divide, 1) if arguments.quick else (arguments.divide, arguments.rounds)
    h, g, d = map(int, arguments.heads.split(":"))
    parts, modes = (tuple(words.split(",")) for words in (arguments.parts, arguments.modes))
    options = Options(
        parts, numbers("--trees", arguments.trees, 0), modes, arguments.mode, (h, g, d),
        divide, rounds, arguments.seconds, arguments.pack_tokens // divide, arguments.cluster,
        tuple(arguments.settings),
    )  # fmt: skip
    what = "trees of shared beginnings beside the same rollouts as separate packed documents, forward and backward"
    unit = f"{ranks.count} ranks; medians of {rounds} rounds, the slowest rank"
    report = Report(arguments.out, ranks.device, what, "trees of shared beginnings, forward and backward", unit)
    save = partial(record, report, ranks.count, options)
    print(save(run_on_ranks(ranks, measure, ranks, options, save)))


def record(report: Report, ranks: int, options: Options, cells: Sequence[dict[str, Any]]) -> str:
    """Write the results so far; return the tables."""
    head = ["part", "tree", "what", "mode", "ms", "TFLOP/s", "of separate", "ideal", "reached", "of causal"]
    rows = [
        [
            *(str(cell.get(key, "")) for key in ("part", "tree", "what", "mode")),
            *(_number(cell.get(key), form) for key, form in (("ms", ".2f"), ("tflops", ".0f"), ("faster", ".2f"))),
            *(
                _number(cell.get(key), form)
                for key, form in (("ideal", ".2f"), ("reached", ".0%"), ("of_causal", ".0%"))
            ),
        ]
        for cell in cells
        if cell["part"] != "plan"
    ]
    settings = asdict(options) | {"began": None}
    return report.write({"ranks": ranks, "settings": settings, "cells": list(cells)}, table(head, rows))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def measure(
    rank: int, ranks: Ranks, options: Options, save: Callable[[Sequence[dict[str, Any]]], object]
) -> list[dict[str, Any]]:
    """Measure all cells; rank 0 prints each of their lines, and calls `save` after every cell."""
    group, cells = world_group(), list[dict[str, Any]]()
    bench = Bench(group, ranks.local_device, 1, True)
    chosen = [trees()[number] for number in options.trees]
    some = [each.divided(options.divide) if options.divide > 1 else each for each in chosen]

    def tell(found: Sequence[dict[str, Any]]) -> None:
        cells.extend(found)
        if rank == 0:
            for each in found:
                print(f"{time.time() - options.began:6.1f} s  {describe(each)}", flush=True)
            save(cells)

    if "attention" in options.parts:
        for each in some:
            if not options.late(group):
                tell(tree_steps.caught(partial(_attention, each, bench, options), "attention", each.name))
    if "steps" in options.parts:
        tree_steps.measure(rank, ranks, options, some, tell)
    return cells


def describe(cell: dict[str, Any]) -> str:
    """Return a cell as one line."""
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in cell.items()
    )


def _attention(tree: Rollouts, bench: Bench, options: Options) -> list[dict[str, Any]]:
    """Measure attention over a tree, the same rollouts apart, and a causal sequence of as many tokens."""
    h, g, d = options.heads
    whole = Case(tree.lengths, h, g, d, 2 if bench.device.type == "cuda" else 4, parents=tree.parents)
    separate, causal = (replace(whole, documents=of, parents=None) for of in (tree.apart, (whole.length,)))
    modes = [find_mode(name, bench.n, ModeOptions()) for name in options.modes]
    chosen = _auto(whole, bench, options)
    found = [_kernel_calls(whole, mode, bench.n) for mode in dict.fromkeys((*modes, chosen))]
    contenders = [("tree", mode, whole) for mode in dict.fromkeys((*modes, chosen))]
    if len({*tree.parents}) > 2:
        contenders += [(_SHARED, mode, whole) for mode in modes]
        found += [_copies_agree(whole, mode, bench) for mode in modes]
        with keys_shared():
            found += [_kernel_calls(whole, mode, bench.n) | {"what": f"kernel calls, {_SHARED}"} for mode in modes]
        created = agents().divided(options.divide) if options.divide > 1 else agents()
        drawn = replace(whole, documents=created.lengths, parents=created.parents)
        contenders += [("tree as created", mode, drawn) for mode in modes[:2]]
    long = separate.length > 2**19  # a step takes a second
    contenders += [("separate", mode, separate) for mode in (modes[1:2] if long else modes[:2])]
    contenders += [("causal", mode, causal) for mode in modes[:2]]
    steps = []
    for what, mode, case in contenders:
        with keys_shared() if what == _SHARED else nullcontext():
            errors = bench.errors(Contender(str(mode), partial(_prepare, bench.group, mode)), _short(case))
            if wrong(errors, case.dtype):
                raise ValueError(f"{what}, {mode}: wrong results: {errors}")
            steps.append(_step(case, mode, bench))
            steps[-1]()  # records its passes
    seconds = _in_turn(steps, bench, options.rounds)
    best = min(s for (what, *_), s in zip(contenders, seconds, strict=True) if what == "separate")
    rate = max(case.flops / s for (what, _, case), s in zip(contenders, seconds, strict=True) if what == "causal")
    ideal = separate.flops / whole.flops
    for (what, mode, case), s in zip(contenders, seconds, strict=True):
        line = {"part": "attention", "tree": tree.name, "what": what, "mode": str(mode), "ms": s * 1e3}
        line |= {"tflops": case.flops / bench.n / s / 1e12, "tokens": case.length, "pairs": case.mask.pairs}
        line |= {"of_causal": case.flops / s / rate}
        if what.startswith("tree"):
            line |= {"faster": best / s, "ideal": ideal, "reached": best / s / ideal, "auto": mode == chosen}
        found.append(line)
    return found


@contextmanager
def keys_shared() -> Iterator[None]:
    """Let calls that are recorded here copy no keys."""
    with mock.patch.object(recorder, "key_copies", return_value=None):
        yield


def _copies_agree(case: Case, mode: Mode, bench: Bench) -> dict[str, Any]:
    """Compare all results of a tree, of full length, with those without copies of keys."""
    tokens = _attention_of(case, mode, bench)[1]
    *qkv, grad = _random(case, tokens, bench.device)
    leaves = [x.requires_grad_() for x in qkv]
    found = []
    for context in (nullcontext, keys_shared):
        with context():
            out = _attention_of(case, mode, bench)[0](*leaves, mask=case.mask)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    errors = {
        name: max(gather_objects(bench.group, float((a - b).float().norm() / b.float().norm())))
        for name, a, b in zip(("out", "dq", "dk", "dv"), *found, strict=True)
    }
    if wrong(errors, case.dtype):
        raise ValueError(f"{mode}: copies of keys give other results: {errors}")
    return {"part": "plan", "tree": f"{len(case.documents)} nodes", "what": "difference", "mode": str(mode)} | errors


def _attention_of(case: Case, mode: Mode, bench: Bench) -> tuple[ContextParallelAttention, int]:
    """Return attention and the number of this rank's tokens."""
    attention = ContextParallelAttention(bench.group, schedule=mode)
    return attention, attention.layout(case.mask).num_tokens(dist.get_rank(bench.group))


def _prepare(group: dist.ProcessGroup, mode: Mode, case: Case) -> Prepared:
    attention = ContextParallelAttention(group, schedule=mode)
    return Prepared(partial(attention, mask=case.mask), list(attention.layout(case.mask).tokens(dist.get_rank(group))))


def _short(case: Case) -> Case:
    """Return the case with about 1,000 tokens."""
    by = max(1, case.length // 1024)
    return replace(case, documents=tuple(max(2, length // by) for length in case.documents))


def _step(case: Case, mode: Mode, bench: Bench) -> Callable[[], object]:
    attention, tokens = _attention_of(case, mode, bench)
    *qkv, grad = _random(case, tokens, bench.device)
    return training_step(partial(attention, mask=case.mask), qkv, grad)


def _random(case: Case, tokens: int, device: torch.device) -> list[torch.Tensor]:
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
    return [torch.randn(tokens, 1, h, case.head_dim, device=device, dtype=case.dtype) for h in heads]


def _in_turn(steps: Sequence[Callable[[], object]], bench: Bench, rounds: int) -> list[float]:
    """Return the median seconds of every step, on the slowest rank. Steps take turns, from another one every round."""

    def once(step: Callable[[], object], count: int) -> float:
        dist.barrier(bench.group)
        return max(gather_objects(bench.group, mean_seconds(step, bench.device, count)))

    counts = []
    for step in steps:
        once(step, 1)  # builds plans and buffers, compiles kernels
        counts.append(max(1, min(20, round(_ROW_S / once(step, 1)))))
    taken: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        for i in range(len(steps)):
            at = (i + number) % len(steps)
            taken[at].append(once(steps[at], counts[at]))
    return [statistics.median(each) for each in taken]


def _auto(case: Case, bench: Bench, options: Options) -> Mode:
    """Return the mode that `auto` takes by the figures of a cluster."""
    target = Target(case.workload, fa4_takes(False), True)
    cluster = load_cluster(options.cluster).resized(bench.n)
    best = choose_mode(Problem(bench.n, case.mask, target), cluster)[0].mode
    assert best is not None
    return best


def _kernel_calls(case: Case, mode: Mode, n: int) -> dict[str, Any]:
    """Return how many kernel calls the ranks make with FlashAttention-4, and of which sizes."""
    plan = build_plan(mode, n, case.mask)
    line: dict[str, Any] = {"part": "plan", "tree": f"{len(case.documents)} nodes", "what": "kernel calls"}
    line |= {"mode": str(mode), "layout": plan.queries.name}
    for name, each in (("forward", plan), ("backward", backward_plan(plan))):
        recorder = Recorder(each, Target(case.workload, fa4_takes(False), True))
        for rank in range(n):
            calls = [op.call for op in recorder.record(rank).ops if isinstance(op, ops.Compute)]
            sizes = [f"{len(c.segments)}:{c.q_span[1] - c.q_span[0]}:{c.pairs / 1e6:.1f}M" for c in calls]
            line[f"{name}, rank {rank}"] = f"{len(calls)} calls (segments:rows:pairs {' '.join(sizes)})"
    return line
