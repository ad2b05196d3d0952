"""`bench prefill`: time to first token of the configured model under each reduction over tensor-parallel ranks."""

from __future__ import annotations

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm.crossover import Crossover
from ..comm.reduction import ReductionPolicy
from ..config import REDUCTIONS, Config, refuse
from ..inference.engine import EngineSettings, LongContextEngine
from ..inference.sampling import Sampling
from ..mcore import groups
from ..mcore.inference import CachedGPT, build_engine, for_inference
from .command import Where, start
from .recorded import Recorded

logger = logging.getLogger(__name__)
_COLOURS = {"none": "#000000", "int8": "#22667a", "int6": "#7a5c99", "int4": "#c0703a", "auto": "#2e7d4f"}


@dataclass(frozen=True)
class Ask:
    """Prompts of so many tokens, reductions of both projections, and measurements of each."""

    lengths: tuple[int, ...]
    reductions: tuple[str, ...]
    iterations: int

    @classmethod
    def of(cls, lengths: str, reductions: str, iterations: int) -> Ask:
        """From words separated by commas; ValueError for what is not offered."""
        words = lengths.split(",")
        if not all(word.isdecimal() and int(word) > 1 for word in words):
            raise refuse("--lengths", lengths, "numbers of 2 or more, separated by commas", "Correct it.")
        names = tuple(dict.fromkeys(reductions.split(",")))
        for name in names:
            if name not in REDUCTIONS:
                raise refuse("--reductions", name, "of " + ", ".join(REDUCTIONS), "Separate them by commas.")
        if iterations < 1:
            raise refuse("--iterations", iterations, "1 or more", "Raise it.")
        return cls(tuple(sorted({int(word) for word in words})), names, iterations)


@dataclass
class Prefill:
    """Seconds from a prompt's arrival to its first token on the host, of the slowest rank, every iteration."""

    tokens: int
    reduction: str
    seconds: list[float]


@dataclass(frozen=True)
class Decided:
    """What `auto` has gone by: sums of `from_bytes` of a rank and more are quantized, None for no size.

    samples: (bytes, seconds of the plain sum, of the quantized one), of the slowest rank.
    """

    operation: str
    dtype: str
    from_bytes: int | None
    samples: tuple[tuple[int, float, float], ...]

    def said(self, lengths: Sequence[int], hidden_size: int, least: float) -> str:
        """In words, with what it means for prompts of these `lengths` (longer ones take several passes of the longest);
        sums below `least` bytes are never quantized."""
        each = hidden_size * getattr(torch, self.dtype).itemsize
        sizes = {tokens: min(tokens, EngineSettings.rank_tokens) * each for tokens in lengths}
        start = math.inf if self.from_bytes is None else max(self.from_bytes, least)
        taken = (
            f"{tokens:,} tokens {'int8' if size >= start else 'none'} ({size / 2**20:.4g} MiB)"
            for tokens, size in sizes.items()
        )
        found = Crossover(self.from_bytes, self.samples)
        return f"auto: {self.operation} of {self.dtype} is quantized {found}; prompts of {', '.join(taken)}."


def run_prefill(config: Config, ask: Ask, out: Path) -> None:
    """Measure, write JSON and a Markdown table after every length, and a picture beside them at the end.

    Args:
        config: its tensor-parallel size is the number of ranks.
        out: a .json file.

    Raises:
        ValueError: settings, sizes or a place that cannot be used.
    """
    if out.suffix != ".json" or not out.parent.is_dir():
        raise refuse("--out", out, "a .json file in a folder that exists", "Give another file name.")
    config = for_inference(config)
    tp, cp = config.parallelism.tensor_parallel_size, config.parallelism.context_parallel_size
    if cp != 1:
        raise refuse("parallelism.context_parallel_size", cp, "1, as tensor-parallel sums are compared", "Set it to 1.")
    cuda = torch.cuda.is_available() and config.train.device != "cpu"
    if tp < 2 or (cuda and tp > torch.cuda.device_count()):
        expected = f"2 to {torch.cuda.device_count()}, the GPUs here" if cuda else "2 or more"
        raise refuse("parallelism.tensor_parallel_size", tp, expected, "Reductions join two ranks at least.")
    config, where = _sized(config, ask), Where(tp, "cuda" if cuda else "cpu")
    record = _Record(out, where.device, config, ask)
    found: list[Prefill]
    decided: list[Decided]
    found, decided = start(where, measure, config, ask, record)[0]
    print(record(found, decided))
    draw(found, out.with_suffix(".png"), record.title)
    logger.info("written to %s, and .md and .png beside it", out)


@dataclass(frozen=True)
class _Record(Recorded):
    """Writes what has been found so far; returns the table."""

    config: Config
    ask: Ask

    @property
    def title(self) -> str:
        config, facts = self.config, self.facts
        layers = f"{config.model.name}, {config.model.num_layers} layers"
        tp = config.parallelism.tensor_parallel_size
        return f"{layers}, TP {tp}, {facts['device']}, {config.train.precision}, {facts['date'][:10]}"

    def __call__(self, found: Sequence[Prefill], decided: Sequence[Decided]) -> str:
        config, ask = self.config, self.ask
        measured = {"output_projection": "as measured", "down_projection": "as measured"}
        data = {
            "what": "time to first token by reduction: random weights, seconds of the slowest rank",
            "environment": self.facts,
            "model": asdict(config.model),
            "tensor_parallel_size": config.parallelism.tensor_parallel_size,
            "precision": config.train.precision,
            "reduction": asdict(config.reduction) | measured,
            "measurements": [asdict(m) | {"median": statistics.median(m.seconds)} for m in found],
            "auto": [asdict(each) for each in decided],
        }
        words = [each.said(ask.lengths, config.model.hidden_size, config.reduction.min_kib * 1024) for each in decided]
        text = "\n".join([table(found), *([""] if decided else []), *words])
        self.write(data, "time to first token, medians in ms (of none's)", text)
        return text


def _sized(config: Config, ask: Ask) -> Config:
    """With a cache for the longest prompt, and layers that can follow every policy."""
    longest = max(ask.lengths) + 64
    return replace(
        config,
        inference=replace(config.inference, cache_tokens=longest, prefill_chunk=None),
        data=replace(config.data, seq_length=max(config.data.seq_length, longest)),
        reduction=replace(config.reduction, output_projection="int8", down_projection="int8"),
    )


Keep = Callable[[Sequence[Prefill], Sequence[Decided]], object]
"""Gets all that has been found so far."""


def measure(rank: int, config: Config, ask: Ask, keep: Keep) -> tuple[list[Prefill], list[Decided]]:
    """All lengths under all reductions, and what `auto` has gone by; `keep` is told by rank 0 after every length.

    In turns, so that a slow moment of the machine meets all of them, in another order each time, since what runs
    before leaves the device warmer or cooler.
    """
    collection = groups.initialize(tensor=config.parallelism.tensor_parallel_size, context=1)
    try:
        engine = build_engine(config, collection, None)[0]
        model, given = engine.model, config.reduction
        assert isinstance(model, CachedGPT)
        rest = (given.group_size, given.symmetric, given.min_kib, given.transport)
        policies = {name: ReductionPolicy(name, *rest) for name in ask.reductions}
        found: list[Prefill] = []
        for tokens in ask.lengths:
            prompt = random.Random(tokens).choices(range(model.vocab_size), k=tokens)  # the same on every rank
            seconds: dict[str, list[float]] = {name: [] for name in policies}
            order = random.Random(tokens)
            for _ in range(1 + ask.iterations):
                for name in order.sample(ask.reductions, len(ask.reductions)):
                    model.follow(policies[name])
                    seconds[name].append(_seconds_to_first(engine, prompt, model.attention.device))
            found += [Prefill(tokens, name, values[1:]) for name, values in seconds.items()]
            if rank == 0:
                keep(found, ())
        if "auto" in policies:
            model.follow(policies["auto"])
        return found, [
            Decided(operation, str(dtype).split(".")[-1], each.from_bytes, each.samples)
            for (operation, dtype), each in model.crossovers().items()
        ]
    finally:
        groups.destroy()


def _seconds_to_first(engine: LongContextEngine, prompt: list[int], device: torch.device) -> float:
    session = engine.open()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    session.append(prompt)
    generation = engine.start(session, Sampling())
    engine.step([generation])  # ends with the token on the host
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
    if generation.finish_reason == "error":
        raise refuse("logits", "not finite", "numbers", "Use train.precision=fp32.")
    session.close()
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def table(found: Sequence[Prefill]) -> str:
    """Markdown; medians in milliseconds."""
    names = list(dict.fromkeys(m.reduction for m in found))
    rows = [["prompt tokens", *names], ["---"] * (1 + len(names))]
    for tokens in dict.fromkeys(m.tokens for m in found):
        medians = {m.reduction: statistics.median(m.seconds) for m in found if m.tokens == tokens}
        plain = medians.get("none")
        cells = [
            f"{s * 1e3:.2f}" + (f" ({s / plain:.3f})" if plain and name != "none" else "")
            for name, s in medians.items()
        ]
        rows.append([f"{tokens:,}", *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(found: list[Prefill], path: Path, title: str) -> None:
    """Write a PNG: time to first token by prompt length, of none's where that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = {m.tokens: statistics.median(m.seconds) for m in found if m.reduction == "none"}
    lengths = list(dict.fromkeys(m.tokens for m in found))
    figure, axes = pyplot.subplots(figsize=(7.0, 4.2))
    for name in dict.fromkeys(m.reduction for m in found):
        medians = {m.tokens: statistics.median(m.seconds) for m in found if m.reduction == name}
        values = [medians[t] / plain[t] if plain else medians[t] * 1e3 for t in lengths]
        axes.plot(lengths, values, color=_COLOURS[name], marker="o", markersize=4, linewidth=1.4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{t:,}" for t in lengths])
    axes.minorticks_off()
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token / that of none" if plain else "time to first token, ms")
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3)
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
