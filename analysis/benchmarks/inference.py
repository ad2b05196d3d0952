"""Time to first token and between tokens of the configured model over a sharded cache, and the quality of `auto`.

Weights are random. The benchmark starts its ranks itself, for one context-parallel size after the other.
"""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from megatron_longctx.config import Config
from megatron_longctx.core.errors import refuse
from megatron_longctx.core.plans.cache_modes import CACHE_MODES
from megatron_longctx.mcore.inference import inference_config
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import Ranks, run_on_ranks

from .inference_ranks import Decoded, FirstToken, Sweep, measure
from .report import Report, check_least, numbers, table

Results = tuple[Sequence[FirstToken], Sequence[Decoded]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", help="group=NAME and key=value")
    parser.add_argument("--lengths", default="2048", help="tokens, cached and new together (default: %(default)s)")
    parser.add_argument(
        "--miss-rates", default="0.01,0.025,0.05,0.1,0.2,0.5,1", help="new tokens as a share of the length"
    )
    parser.add_argument("--modes", default="pass_kv,pass_q", help=f"modes for first tokens: {','.join(CACHE_MODES)}")
    parser.add_argument("--batches", default="1,4", help="sequences decoded together (default: %(default)s)")
    parser.add_argument("--context", help="context-parallel sizes, e.g. 1,2,4,8 (default: the settings')")
    parser.add_argument("--iterations", type=int, default=5, help="0: measure the first time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="decoded tokens per sequence (default: %(default)s)")
    parser.add_argument("--decode-only", action="store_true", help="measure only times between tokens")


def run(arguments: argparse.Namespace) -> None:
    """Measure; write JSON and a Markdown report after every measurement."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise refuse("RANK", os.environ["RANK"], "to be started once", "Run it without torchrun: it starts its ranks.")
    sweep, config = sweep_of(arguments), inference_config(compose_config(arguments.settings))
    sizes: Sequence[int] = [config.parallelism.context_parallel_size]
    if arguments.context is not None:
        sizes = numbers("--context", arguments.context, 1)
    jobs = [_sized(config, sweep, n) for n in sizes]
    ranks_of_jobs = [_ranks(job) for job in jobs]
    what = "inference over a sharded cache: random weights, times of the slowest rank in seconds"
    tp = config.parallelism.tensor_parallel_size
    about = f"{config.model.name}, {config.train.precision}, TP {tp}"
    first: list[FirstToken] = []
    decoded: list[Decoded] = []
    for job, ranks in zip(jobs, ranks_of_jobs, strict=True):
        report = Report(arguments.out, ranks.device, what, about, "random weights; times in ms, of the slowest rank")
        save = partial(record, report, job, sweep, (tuple(first), tuple(decoded)))
        of_size = run_on_ranks(ranks, measure, job, sweep, save)
        first += of_size[0]
        decoded += of_size[1]
    print(tables(first, decoded))


def sweep_of(arguments: argparse.Namespace) -> Sweep:
    """Return the sweep of the options; ValueError for values that cannot be used."""
    check_least("--iterations", arguments.iterations, 0)
    check_least("--tokens", arguments.tokens)
    lengths, batches = numbers("--lengths", arguments.lengths, 2), numbers("--batches", arguments.batches, 1)
    rates = numbers("--miss-rates", arguments.miss_rates, 0.0)
    if not 0 < min(rates) <= max(rates) <= 1:
        raise refuse("--miss-rates", arguments.miss_rates, "shares from above 0 to 1", "1 computes all tokens.")
    modes = tuple(dict.fromkeys(arguments.modes.split(",")))
    if not set(modes) <= set(CACHE_MODES):
        raise refuse("--modes", arguments.modes, "some of " + ", ".join(CACHE_MODES), "Separate them by commas.")
    return Sweep(lengths, rates, batches, arguments.iterations, arguments.tokens, arguments.decode_only, modes)


def record(
    report: Report, config: Config, sweep: Sweep, earlier: Results, first: list[FirstToken], decoded: list[Decoded]
) -> None:
    """Write the results of one size so far, after the `earlier` ones of other sizes."""
    first, decoded = [*earlier[0], *first], [*earlier[1], *decoded]
    data = {
        "model": asdict(config.model),
        "inference": asdict(config.inference),
        "precision": config.train.precision,
        "tensor_parallel_size": config.parallelism.tensor_parallel_size,
        "sweep": asdict(sweep),
        **as_data(first, decoded),
    }
    report.write(data, tables(first, decoded))


def _sized(config: Config, sweep: Sweep, n: int) -> Config:
    """Return the settings for `n` context-parallel ranks, with the cache and positions that `sweep` needs."""
    inference = config.inference
    # `pages_per_rank` turns this into the required number of pages.
    cache = (n * sweep.pages(n, inference.page_tokens) - (n - 1)) * inference.page_tokens
    longest = max(sweep.lengths) + 2 * sweep.tokens + 64
    return replace(
        config,
        parallelism=replace(config.parallelism, context_parallel_size=n),
        inference=replace(inference, cache_tokens=cache),
        data=replace(config.data, seq_length=max(config.data.seq_length, longest)),
    )


def _ranks(config: Config) -> Ranks:
    count = config.parallelism.context_parallel_size * config.parallelism.tensor_parallel_size
    return Ranks.of(count, config.train.device, least=1)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the mean, and the 50th, 90th and 99th percentile by nearest rank."""
    ranked = sorted(seconds)
    named = {f"p{p}": ranked[max(0, math.ceil(p / 100 * len(ranked)) - 1)] for p in (50, 90, 99)}
    return {"mean": sum(ranked) / len(ranked), **named}


def as_data(first: Sequence[FirstToken], decoded: Sequence[Decoded]) -> dict[str, Any]:
    """Return the measurements for JSON, in seconds."""
    return {
        "first_token": [
            {
                **{"context_parallel_size": m.ranks, "tokens": m.length, "new": m.new, "cached": m.cached},
                "miss_rate": m.new / m.length,
                "seconds": {mode: {**percentiles(s), "all": s} for mode, s in m.seconds.items()},
                **{"auto": m.auto, "slower": m.slower},
            }
            for m in first
        ],
        "decode": [
            {"context_parallel_size": m.ranks, "cached": m.cached, "batch": m.batch, "mode": m.mode}
            | percentiles(m.seconds)
            for m in decoded
        ],
    }


def tables(first: Sequence[FirstToken], decoded: Sequence[Decoded]) -> str:
    """Return Markdown with times in milliseconds."""
    parts = [_first_table(first), ""] if first else []
    rows = []
    for m in decoded:
        times = [f"{seconds * 1e3:.2f}" for seconds in percentiles(m.seconds).values()]
        rows.append([str(m.ranks), f"{m.cached:,}", str(m.batch), m.mode, *times])
    head = ["CP", "cached", "batch", "mode", "per token (mean)", "p50", "p90", "p99"]
    return "\n".join([*parts, "Decode: time between tokens, over random keys and values", "", table(head, rows)])


def _first_table(first: Sequence[FirstToken]) -> str:
    modes, rows = list(dict.fromkeys(mode for m in first for mode in m.seconds)), []
    for m in first:
        by_mode = {mode: percentiles(seconds) for mode, seconds in m.seconds.items()}
        times = [
            " / ".join(f"{by_mode[mode][p] * 1e3:.2f}" for p in ("p50", "p90", "p99")) if mode in by_mode else ""
            for mode in modes
        ]
        slower = "" if m.slower is None else f"{m.slower:.1%}"
        case = [str(m.ranks), f"{m.length:,}", f"{m.new:,}", f"{m.new / m.length:.2%}"]
        rows.append([*case, *times, m.auto or "", slower])
    about = "Time to first token: p50 / p90 / p99. A single rank passes nothing: its time is under the first mode."
    return f"{about}\n\n{table(['CP', 'tokens', 'new', 'miss rate', *modes, 'auto takes', 'slower'], rows)}"
