"""Times to first token and between tokens of the configured model over a sharded cache, and how well `auto` chooses.
Weights are random. It starts its ranks itself, for one context-parallel size after the other."""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megatron_longctx.calibrate.command import calibrate
from megatron_longctx.compose import compose_config
from megatron_longctx.config import Config
from megatron_longctx.errors import refuse
from megatron_longctx.inference.choice import calibration_file, find_rule_inputs
from megatron_longctx.mcore.inference import for_inference
from megatron_longctx.schedules.cache_modes import CACHE_MODES
from megatron_longctx.training.ranks import Ranks, run_on_ranks

from .inference_ranks import Decoded, FirstToken, Sweep, measure, numbers
from .recorded import Report, table

logger = logging.getLogger(__name__)


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
    """Measure, write JSON and a Markdown report after every measurement; links that are not calibrated for the model's
    heads are calibrated first.

    Raises:
        ValueError: settings or sizes that cannot be used.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise refuse("RANK", os.environ["RANK"], "to be started once", "Run it without torchrun: it starts its ranks.")
    sweep, config = sweep_of(arguments), for_inference(compose_config(arguments.settings))
    sizes = [config.parallelism.context_parallel_size]
    if arguments.context is not None:
        sizes = list(map(int, numbers("--context", arguments.context, 1)))
    jobs = [_sized(config, sweep, n) for n in sizes]
    places = [_where(job) for job in jobs]
    for job in () if sweep.decode_only else jobs:
        _calibrated(job)
    what = "inference over a sharded cache: random weights, times of the slowest rank in seconds"
    tp = config.parallelism.tensor_parallel_size
    about = f"{config.model.name}, {config.train.precision}, TP {tp}"
    first: list[FirstToken] = []
    decoded: list[Decoded] = []
    for job, where in zip(jobs, places, strict=True):
        report = Report(arguments.out, where.device, what, about, "random weights; times in ms, of the slowest rank")
        record = Record(report, job, sweep, tuple(first), tuple(decoded))
        found = run_on_ranks(where, measure, job, sweep, record)
        first += found[0]
        decoded += found[1]
    print(tables(first, decoded))


def sweep_of(arguments: argparse.Namespace) -> Sweep:
    """Raises ValueError for what cannot be swept over."""
    for name, value, least in (("--iterations", arguments.iterations, 0), ("--tokens", arguments.tokens, 1)):
        if value < least:
            raise refuse(name, value, f"{least} or more", "Raise it.")
    lengths = map(int, numbers("--lengths", arguments.lengths, 2))
    batches = map(int, numbers("--batches", arguments.batches, 1))
    rates = numbers("--miss-rates", arguments.miss_rates, 0.0)
    if not 0 < min(rates) <= max(rates) <= 1:
        raise refuse("--miss-rates", arguments.miss_rates, "shares from above 0 to 1", "1 computes all tokens anew.")
    modes = tuple(dict.fromkeys(arguments.modes.split(",")))
    if not set(modes) <= set(CACHE_MODES):
        raise refuse("--modes", arguments.modes, "some of " + ", ".join(CACHE_MODES), "Separate them by commas.")
    said = arguments.iterations, arguments.tokens, arguments.decode_only, modes
    return Sweep(tuple(lengths), rates, tuple(batches), *said)


@dataclass(frozen=True)
class Record:
    """Writes what one size's ranks have found so far, behind what was found `first` and `decoded` with others."""

    report: Report
    config: Config
    sweep: Sweep
    first: tuple[FirstToken, ...]
    decoded: tuple[Decoded, ...]

    def __call__(self, first: list[FirstToken], decoded: list[Decoded]) -> None:
        first, decoded, config = [*self.first, *first], [*self.decoded, *decoded], self.config
        data = {
            "model": asdict(config.model),
            "inference": asdict(config.inference),
            "precision": config.train.precision,
            "tensor_parallel_size": config.parallelism.tensor_parallel_size,
            "sweep": asdict(self.sweep),
            **as_data(first, decoded),
        }
        self.report.write(data, tables(first, decoded))


def _sized(config: Config, sweep: Sweep, n: int) -> Config:
    """The settings for `n` context-parallel ranks, with the cache and the positions that `sweep` takes."""
    inference = config.inference
    # What `pages_per_rank` makes so many pages of.
    cache = n * (sweep.pages(n, inference.page_tokens) * inference.page_tokens - 2)
    longest = max(sweep.lengths) + 2 * sweep.tokens + 64
    return replace(
        config,
        parallelism=replace(config.parallelism, context_parallel_size=n),
        inference=replace(inference, cache_tokens=cache),
        data=replace(config.data, seq_length=max(config.data.seq_length, longest)),
    )


def _where(config: Config) -> Ranks:
    ranks = config.parallelism.context_parallel_size * config.parallelism.tensor_parallel_size
    return Ranks.of(ranks, config.train.device, least=1)


def _calibrated(config: Config) -> None:
    """See that the simulator knows this device."""
    n, device = config.parallelism.context_parallel_size, config.train.device
    where = Ranks.of(n, device, least=1)
    if n > 1 and find_rule_inputs(config, torch.device(where.device)).costs is None:
        logger.info("%s is not there: calibrating", calibration_file(config, torch.device(where.device)))
        attention = replace(config.attention, transport=config.inference.transport)
        calibrate(where, replace(config, attention=attention, data=replace(config.data, seq_length=1)))


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, and 50th, 90th and 99th percentile by nearest rank."""
    ranked = sorted(seconds)
    found = {f"p{p}": ranked[max(0, math.ceil(p / 100 * len(ranked)) - 1)] for p in (50, 90, 99)}
    return {"mean": sum(ranked) / len(ranked), **found}


def as_data(first: Sequence[FirstToken], decoded: Sequence[Decoded]) -> dict[str, Any]:
    """The measurements, in seconds."""
    return {
        "first_token": [
            {
                **{"context_parallel_size": m.ranks, "tokens": m.length, "new": m.new, "cached": m.cached},
                "miss_rate": m.new / m.length,
                "seconds": {mode: {**percentiles(s), "all": s} for mode, s in m.seconds.items()},
                **{"auto": m.auto, "slower": m.slower, "predicted_layer_s": m.predicted},
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
    """Markdown; times in milliseconds."""
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
        found = {mode: percentiles(seconds) for mode, seconds in m.seconds.items()}
        times = [
            " / ".join(f"{found[mode][p] * 1e3:.2f}" for p in ("p50", "p90", "p99")) if mode in found else ""
            for mode in modes
        ]
        slower = "" if m.slower is None else f"{m.slower:.1%}"
        case = [str(m.ranks), f"{m.length:,}", f"{m.new:,}", f"{m.new / m.length:.2%}"]
        rows.append([*case, *times, m.auto or "", slower])
    said = "Time to first token: p50 / p90 / p99. A rank alone passes nothing: its time is under the first mode."
    return f"{said}\n\n{table(['CP', 'tokens', 'new', 'miss rate', *modes, 'auto takes', 'slower'], rows)}"
