"""Time to first token of the configured model for each reduction over tensor-parallel ranks. Weights are random."""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.config import REDUCTIONS, Config, ReductionConfig
from megatron_longctx.core.comm import gather_objects
from megatron_longctx.core.comm.symmetric import symmetric_memory, why_no_peer_memory
from megatron_longctx.core.errors import refuse
from megatron_longctx.lowbit.reduction import ReductionPolicy
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import CachedGPT, build_engine, inference_config
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from .inference_ranks import seconds_to_first
from .report import Report, check_least, numbers, table

TWO_SHOT = "two_shot"
"""torch's all-reduce in two steps over symmetric memory; its multimem needs NVLink multicast, which is off here."""
DEFAULT = "none,two_shot,int8,int6,int4,int4:32,auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", help="group=NAME and key=value")
    parser.add_argument("--lengths", default="1024,4096,16384,32768", help="prompt tokens (default: %(default)s)")
    parser.add_argument("--reductions", default=DEFAULT, help="int4:32 is int4 in groups of 32 (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=5, help="of each time to first token (default: %(default)s)")


@dataclass(frozen=True)
class Options:
    """Prompt lengths, reductions (of both projections), and iterations of each."""

    lengths: tuple[int, ...]
    reductions: tuple[str, ...]
    iterations: int


@dataclass
class Prefill:
    """For every iteration, seconds from a prompt's arrival to its first token on the host, on the slowest rank."""

    tokens: int
    reduction: str
    seconds: list[float]


@dataclass
class Results:
    """The measurements, what `auto` takes by size, by operation and dtype, and why reductions are missing."""

    measured: list[Prefill] = field(default_factory=list)
    auto: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def run(arguments: argparse.Namespace) -> None:
    """Measure on as many ranks as the tensor-parallel size; write JSON and a Markdown table after every length."""
    names = tuple(dict.fromkeys(arguments.reductions.split(",")))
    if not {name.partition(":")[0] for name in names} <= {*REDUCTIONS, TWO_SHOT}:
        known = ", ".join((*REDUCTIONS, TWO_SHOT))
        raise refuse("--reductions", arguments.reductions, f"of {known}", "Separate them by commas.")
    check_least("--iterations", arguments.iterations)
    lengths = sorted(numbers("--lengths", arguments.lengths, 2))
    config = inference_config(compose_config(arguments.settings))
    tp, cp = config.parallelism.tensor_parallel_size, config.parallelism.context_parallel_size
    if cp != 1:
        raise refuse("parallelism.context_parallel_size", cp, "1, as tensor-parallel sums are compared", "Set it to 1.")
    if tp < 2:
        raise refuse("parallelism.tensor_parallel_size", tp, "2 or more", "Reductions join two ranks at least.")
    for name in names:
        _policy(name, config.reduction)
    options, ranks = Options(tuple(lengths), names, arguments.iterations), Ranks.of(tp, config.train.device)
    config = sized(config, lengths[-1] + 64)
    what = "time to first token by reduction: random weights, seconds of the slowest rank"
    about = f"{config.model.name}, {config.model.num_layers} layers, TP {tp}, {config.train.precision}"
    report = Report(arguments.out, ranks.device, what, about, "time to first token, medians in ms (of none's)")
    save = partial(record, report, config)
    print(save(run_on_ranks(ranks, measure, config, options, save)))


def record(report: Report, config: Config, results: Results) -> str:
    """Write the results so far; return the table."""
    both = {"output_projection": "as measured", "down_projection": "as measured"}
    data = {
        "model": asdict(config.model),
        "tensor_parallel_size": config.parallelism.tensor_parallel_size,
        "precision": config.train.precision,
        "reduction": asdict(config.reduction) | both,
        "measurements": [asdict(m) | {"median": statistics.median(m.seconds)} for m in results.measured],
        "auto": results.auto,
        "left_out": results.left_out,
    }
    lines = [medians(results.measured)]
    lines += [f"\nLeft out: {name} ({why})." for name, why in results.left_out.items()]
    lines += [f"\nauto: {operation}: {taken}" for operation, taken in results.auto.items()]
    return report.write(data, "\n".join(lines))


def sized(config: Config, longest: int) -> Config:
    """Return the configuration with a cache of `longest` tokens, and layers that can follow every policy."""
    return replace(
        config,
        inference=replace(config.inference, cache_tokens=longest, prefill_chunk=None),
        data=replace(config.data, seq_length=max(config.data.seq_length, longest)),
        reduction=replace(config.reduction, output_projection="int8", down_projection="int8"),
    )


def measure(rank: int, config: Config, options: Options, save: Callable[[Results], object]) -> Results:
    """Measure all lengths with all reductions, and what `auto` takes; rank 0 calls `save` after every length.

    Reductions alternate, so that a slow moment of the machine affects all of them, in another order in each iteration,
    because the previous one leaves the device warmer or cooler.
    """
    collection = groups.initialize(tensor=config.parallelism.tensor_parallel_size, context=1)
    try:
        engine = build_engine(config, collection, None)[0]
        model, reduction, results = engine.model, config.reduction, Results()
        assert isinstance(model, CachedGPT)
        names, two_shot = list(options.reductions), None
        if TWO_SHOT in names:
            reason = why_no_peer_memory(collection.tp, model.attention.device)
            if reason is None:
                two_shot = _TwoShot(collection.tp, model, max(options.lengths))
            else:
                names.remove(TWO_SHOT)
                results.left_out[TWO_SHOT] = reason
        for tokens in options.lengths:
            shared = random.Random(tokens)  # the same on every rank
            prompt = shared.choices(range(model.vocab_size), k=tokens)
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(1 + options.iterations):
                for name in shared.sample(names, len(names)):
                    for module in model.reduced():
                        module.set_policy(_policy(name, reduction))
                    if name == TWO_SHOT and two_shot is not None:
                        two_shot.use(model)
                    session = engine.open()
                    seconds[name].append(max(gather_objects(world_group(), seconds_to_first(engine, session, prompt))))
                    session.close()
            results.measured += [Prefill(tokens, name, values[1:]) for name, values in seconds.items()]
            if rank == 0:
                save(results)
        if "auto" in names:
            for module in model.reduced():
                module.set_policy(_policy("auto", reduction))
                for (operation, dtype), timings in module.reducer.timings.items():
                    results.auto[f"{operation} of {str(dtype).split('.')[-1]}"] = str(timings)
        return results
    finally:
        groups.destroy()


def _policy(name: str, reduction: ReductionConfig) -> ReductionPolicy:
    """Return the policy of a name such as `int4:32`, with the other settings of `reduction`."""
    mode, _, size = name.partition(":")
    rest = (reduction.symmetric, reduction.min_kib, reduction.transport)
    return ReductionPolicy("none" if mode == TWO_SHOT else mode, int(size or reduction.group_size), *rest)


class _TwoShot:
    """torch's two-step all-reduce, in the place of a `Reducer`. It copies sums into and out of symmetric memory."""

    def __init__(self, group: dist.ProcessGroup, model: CachedGPT, tokens: int) -> None:
        numel, attention = tokens * model._gpt.config.hidden_size, model.attention
        self._buffer = symmetric_memory().empty(numel, dtype=attention.shape.dtype, device=attention.device)
        symmetric_memory().rendezvous(self._buffer, group)
        self._group = group

    def use(self, model: CachedGPT) -> None:
        for module in model.reduced():
            module.reducer = self  # type: ignore[assignment]

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        part = self._buffer[: x.numel()].copy_(x.view(-1))
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self._group.group_name)
        return x.copy_(part.view(x.shape))


def medians(measured: Sequence[Prefill]) -> str:
    """Return Markdown with times in milliseconds."""
    rows, names = [], list(dict.fromkeys(m.reduction for m in measured))
    for tokens in dict.fromkeys(m.tokens for m in measured):
        of_length = {m.reduction: statistics.median(m.seconds) for m in measured if m.tokens == tokens}
        exact = of_length.get("none")
        cells = [
            f"{s * 1e3:.2f}" + (f" ({s / exact:.3f})" if exact and name != "none" else "")
            for name, s in of_length.items()
        ]
        rows.append([f"{tokens:,}", *cells])
    return table(["prompt tokens", *names], rows)
