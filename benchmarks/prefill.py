"""Time to first token of the configured model under each reduction over tensor-parallel ranks. Weights are random."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from megatron_longctx.comm import gather_objects
from megatron_longctx.compose import compose_config
from megatron_longctx.config import REDUCTIONS, Config
from megatron_longctx.errors import refuse
from megatron_longctx.lowbit.reduction import ReductionPolicy
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import CachedGPT, build_engine, for_inference
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from .inference_ranks import numbers, seconds_to_first
from .recorded import Report, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", help="group=NAME and key=value")
    parser.add_argument("--lengths", default="1024,4096,16384,32768", help="prompt tokens (default: %(default)s)")
    parser.add_argument("--reductions", default="none,int8,int6,int4,auto", help="(default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=5, help="of each time to first token (default: %(default)s)")


@dataclass(frozen=True)
class Ask:
    """Prompts of so many tokens, reductions of both projections, and measurements of each."""

    lengths: tuple[int, ...]
    reductions: tuple[str, ...]
    iterations: int


@dataclass
class Prefill:
    """Seconds from a prompt's arrival to its first token on the host, of the slowest rank, every iteration."""

    tokens: int
    reduction: str
    seconds: list[float]


@dataclass
class Found:
    """auto_from_bytes: of which sums on `auto` are quantized, by operation and dtype; None for no size."""

    measured: list[Prefill] = field(default_factory=list)
    auto_from_bytes: dict[str, int | None] = field(default_factory=dict)


def run(arguments: argparse.Namespace) -> None:
    """Measure, write JSON and a Markdown table after every length; there are as many ranks as the tensor-parallel size.

    Raises:
        ValueError: settings or sizes that cannot be used.
    """
    names = tuple(dict.fromkeys(arguments.reductions.split(",")))
    if not set(names) <= set(REDUCTIONS):
        raise refuse("--reductions", arguments.reductions, "of " + ", ".join(REDUCTIONS), "Separate them by commas.")
    if arguments.iterations < 1:
        raise refuse("--iterations", arguments.iterations, "1 or more", "Raise it.")
    lengths = sorted(map(int, numbers("--lengths", arguments.lengths, 2)))
    config = for_inference(compose_config(arguments.settings))
    tp, cp = config.parallelism.tensor_parallel_size, config.parallelism.context_parallel_size
    if cp != 1:
        raise refuse("parallelism.context_parallel_size", cp, "1, as tensor-parallel sums are compared", "Set it to 1.")
    if tp < 2:
        raise refuse("parallelism.tensor_parallel_size", tp, "2 or more", "Reductions join two ranks at least.")
    ask, where = Ask(tuple(lengths), names, arguments.iterations), Ranks.of(tp, config.train.device)
    config = _sized(config, ask)
    what = "time to first token by reduction: random weights, seconds of the slowest rank"
    about = f"{config.model.name}, {config.model.num_layers} layers, TP {tp}, {config.train.precision}"
    report = Report(arguments.out, where.device, what, about, "time to first token, medians in ms (of none's)")
    keep = partial(record, report, config)
    print(keep(run_on_ranks(where, measure, config, ask, keep)))


def record(report: Report, config: Config, found: Found) -> str:
    """Write what has been found so far; returns the table."""
    measured = {"output_projection": "as measured", "down_projection": "as measured"}
    data = {
        "model": asdict(config.model),
        "tensor_parallel_size": config.parallelism.tensor_parallel_size,
        "precision": config.train.precision,
        "reduction": asdict(config.reduction) | measured,
        "measurements": [asdict(m) | {"median": statistics.median(m.seconds)} for m in found.measured],
        "auto_from_bytes": found.auto_from_bytes,
    }
    lines = [medians(found.measured)]
    for operation, first in found.auto_from_bytes.items():
        lines += ["", f"auto: {operation} is quantized {'never' if first is None else f'from {first:,} bytes on'}"]
    return report.write(data, "\n".join(lines))


def _sized(config: Config, ask: Ask) -> Config:
    """With a cache for the longest prompt, and layers that can follow every policy."""
    longest = max(ask.lengths) + 64
    return replace(
        config,
        inference=replace(config.inference, cache_tokens=longest, prefill_chunk=None),
        data=replace(config.data, seq_length=max(config.data.seq_length, longest)),
        reduction=replace(config.reduction, output_projection="int8", down_projection="int8"),
    )


def measure(rank: int, config: Config, ask: Ask, keep: Callable[[Found], object]) -> Found:
    """All lengths under all reductions, and what `auto` has gone by; `keep` is told by rank 0 after every length.

    In turns, so that a slow moment of the machine meets all of them, in another order each time, since what runs
    before leaves the device warmer or cooler.
    """
    collection = groups.initialize(tensor=config.parallelism.tensor_parallel_size, context=1)
    try:
        engine = build_engine(config, collection, None)[0]
        model, given, found = engine.model, config.reduction, Found()
        assert isinstance(model, CachedGPT)
        rest = (given.group_size, given.symmetric, given.min_kib, given.transport)
        policies = {name: ReductionPolicy(name, *rest) for name in ask.reductions}
        for tokens in ask.lengths:
            order = random.Random(tokens)  # the same on every rank
            prompt = order.choices(range(model.vocab_size), k=tokens)
            seconds: dict[str, list[float]] = {name: [] for name in policies}
            for _ in range(1 + ask.iterations):
                for name in order.sample(ask.reductions, len(ask.reductions)):
                    model.set_reduction_policy(policies[name])
                    session = engine.open()
                    seconds[name].append(max(gather_objects(world_group(), seconds_to_first(engine, session, prompt))))
                    session.close()
            found.measured += [Prefill(tokens, name, values[1:]) for name, values in seconds.items()]
            if rank == 0:
                keep(found)
        if "auto" in policies:
            model.set_reduction_policy(policies["auto"])
            for (operation, dtype), crossover in model.crossovers().items():
                found.auto_from_bytes[f"{operation} of {str(dtype).split('.')[-1]}"] = crossover.from_bytes
        return found
    finally:
        groups.destroy()


def medians(found: Sequence[Prefill]) -> str:
    """Markdown; in milliseconds."""
    rows, names = [], list(dict.fromkeys(m.reduction for m in found))
    for tokens in dict.fromkeys(m.tokens for m in found):
        of_length = {m.reduction: statistics.median(m.seconds) for m in found if m.tokens == tokens}
        plain = of_length.get("none")
        cells = [
            f"{s * 1e3:.2f}" + (f" ({s / plain:.3f})" if plain and name != "none" else "")
            for name, s in of_length.items()
        ]
        rows.append([f"{tokens:,}", *cells])
    return table(["prompt tokens", *names], rows)
