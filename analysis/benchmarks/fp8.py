"""Weights in FP8 against the model's own, and low-bit sums: matrix products, decode, prompts, and times to first token.

Weights are random. Two ranks measure one layer's products alone, then the model on 1 rank, with tensor parallelism 2
and with context parallelism 2, and last the times to first token by reduction. Every line is printed as it is measured.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_longctx.config import Config, ModelConfig
from megatron_longctx.core.comm import gather_objects
from megatron_longctx.core.comm.device import synchronize
from megatron_longctx.inference import fp8
from megatron_longctx.inference.fp8 import Fp8Weight
from megatron_longctx.inference.sampling import PromptScores
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import build_engine, inference_config
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from . import prefill
from .inference_ranks import Benchmark, Sweep, randomize, seconds_to_first
from .report import Report, check_least, numbers, table

KINDS = ("exact", "fp8")
SIZES = ((1, 1), (2, 1), (1, 2))
"""Tensor- and context-parallel sizes. With 1 and 1, both ranks measure the same on their own GPUs."""
_LAYERS, _CALLS = 2, 10
"""The layers whose weights the products alternate between, so that caches do not hold them; the calls of a row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", default=["model=llama3_8b"], help="group=NAME and key=value")
    parser.add_argument("--lengths", default="1024,131072", help="cached tokens of decode (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of the shortest length (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--prompts", default="1024,4096,16384,32768", help="of each reduction (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of every measurement (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="decoded in a round (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=200, help="begin nothing later (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="4 layers, short texts, one round: compares values")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


@dataclass(frozen=True)
class Options:
    lengths: tuple[int, ...]
    batch: int
    prompt: int
    prompts: tuple[int, ...]
    rounds: int
    tokens: int
    until: float  # the wall clock's time at which nothing begins any more


@dataclass
class Results:
    """Cells by name: seconds of every round by contender, or numbers; and notes: what failed or was left out, and why;
    what `auto` takes."""

    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def run(arguments: argparse.Namespace) -> None:
    """Measure; write JSON and a Markdown table after every cell."""
    check_least("--rounds", arguments.rounds)
    until = time.time() + arguments.seconds
    settings = [*arguments.settings, f"train.device={arguments.device}"]
    lengths, prompts = (numbers(f"--{name}", getattr(arguments, name), 2) for name in ("lengths", "prompts"))
    options = Options(lengths, arguments.batch, arguments.prompt, prompts, arguments.rounds, arguments.tokens, until)
    if arguments.quick:
        settings.append("model.num_layers=4")
        short = tuple(min(4096, length) for length in lengths)
        options = Options(short, 2, min(2048, arguments.prompt), (min(1024, *prompts),), 1, 4, until)
    config = compose_config(settings)
    ranks = Ranks.of(2, arguments.device)
    about = f"{config.model.name}, {config.model.num_layers} layers, {config.train.precision}"
    report = Report(arguments.out, ranks.device, "FP8 weights and low-bit sums; seconds", about, "medians in ms")
    save = partial(record, report, config)
    print(save(run_on_ranks(ranks, measure, config, options, save)))


def record(report: Report, config: Config, results: Results) -> str:
    """Write the results so far; return the table."""
    rows = [
        [name, *("" if kind not in cell else _ms(cell[kind]) for kind in KINDS), _other(cell)]
        for name, cell in results.cells.items()
    ]
    lines = [table(["cell", *KINDS, "others"], rows), *(f"\n{name}: {why}" for name, why in results.notes.items())]
    cells = [
        {"name": name, "medians": {k: statistics.median(v) for k, v in cell.items() if isinstance(v, list)}, **cell}
        for name, cell in results.cells.items()
    ]
    data = {"model": config.model.name, "cells": cells, "notes": results.notes}
    return report.write(data, "\n".join(lines))


def _ms(value: Any) -> str:
    return f"{statistics.median(value) * 1e3:.3f}" if isinstance(value, list) else f"{value:.6g}"


def _other(cell: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_ms(value)}" for key, value in cell.items() if key not in KINDS)


class _Measurement:
    """What all parts of the measurement share."""

    def __init__(self, rank: int, options: Options, save: Callable[[Results], object]) -> None:
        self.rank, self.options, self.results, self._save = rank, options, Results(), save
        self._begin = time.perf_counter()

    def add(self, name: str, cell: dict[str, Any]) -> None:
        self.results.cells[name] = cell
        self.say(f"{name}: " + ", ".join(f"{key} {_ms(value)}" for key, value in cell.items()))

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self._begin:5.1f} s] {line}", file=sys.stderr, flush=True)
            self._save(self.results)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part; a failure is recorded, and the next part runs."""
        try:
            yield
        except Exception as error:
            self.results.notes[name] = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            self.say(f"{name} failed: {self.results.notes[name]}")
        finally:
            groups.destroy()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def has_time(self, name: str) -> bool:
        """Whether to begin a part, by rank 0's clock."""
        early = bool(gather_objects(world_group(), time.time() < self.options.until)[0])
        if not early:
            self.results.notes[name] = "left out: the time was over"
            self.say(f"{name} left out")
        return early

    def slowest(self, seconds: float) -> float:
        return max(gather_objects(world_group(), seconds))


def measure(rank: int, config: Config, options: Options, save: Callable[[Results], object]) -> Results:
    """Measure all parts on two ranks; rank 0 calls `save` after every cell."""
    job = _Measurement(rank, options, save)
    with job.part("products"):
        _products(job, config.model)
    for tensor, context in SIZES:
        name = {(1, 1): "1 GPU", (2, 1): "TP 2", (1, 2): "CP 2"}[tensor, context]
        if job.has_time(name):
            par = replace(config.parallelism, tensor_parallel_size=tensor, context_parallel_size=context)
            with job.part(name):
                _model(job, name, inference_config(replace(config, parallelism=par)))
    if job.has_time("first tokens"):
        with job.part("first tokens"):
            _first_tokens(job, config)
    return job.results


def _products(job: _Measurement, model: ModelConfig) -> None:
    """Time a layer's four products, by rows: in bf16; with plain operations that quantize; with one kernel for a row's
    quantization; and, for one row, with the kernel that quantizes within the product, in tiles of several sizes."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    shapes = (((model.num_attention_heads + 2 * model.num_kv_heads) * d, h), (h, h), (2 * f, h), (h, f))
    weights = [[torch.randn(shape, device=device).bfloat16() for shape in shapes] for _ in range(_LAYERS)]
    quantized = [[Fp8Weight.of(weight) for weight in layer] for layer in weights]
    for rows in (1, job.options.batch, 128, job.options.prompt):
        inputs = [torch.randn(rows, shape[1], device=device).bfloat16() for shape in shapes]
        ways: dict[str, Callable[[], list[Tensor]]] = {
            "exact": partial(_apply, functional.linear, inputs, weights),
            "plain operations": partial(_apply, _with(fp8._quantize_torch), inputs, quantized),
            "one kernel": partial(_apply, _with(fp8.quantize_rows), inputs, quantized),
        }
        if rows > 128:
            ways["one kernel, fast accumulation"] = partial(
                _apply, _with(fp8.quantize_rows, fast=True), inputs, quantized
            )
        for tile in ((16, 512, 4), (16, 1024, 4), (16, 1024, 8), (32, 512, 4), (8, 1024, 4), (8, 2048, 8)):
            if rows == 1 and device.type == "cuda":
                ways["within the product, " + " ".join(map(str, tile))] = partial(
                    _apply, _tiled(tile), inputs, quantized
                )
        expected, graphs = ways["plain operations"](), {}
        cell: dict[str, list[float]] = {}
        for name, way in ways.items():
            for found, wanted in zip(way(), expected, strict=True):
                off = float((found.float() - wanted.float()).norm() / wanted.float().norm())
                if off > (0.1 if name == "exact" else 0.01):
                    raise ValueError(f"{name}, {rows} rows: off by {off:.3g} of the product of plain operations")
            graphs[name] = _graph(way, device) if rows <= 128 else way
        for _ in range(1 + job.options.rounds):
            for name, graph in graphs.items():
                cell.setdefault(name, []).append(job.slowest(_seconds(graph, device) / _LAYERS))
        job.add(f"a layer's products, {rows:,} rows", {name: seconds[1:] for name, seconds in cell.items()})


def _apply(product: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Sequence[Any]]) -> list[Tensor]:
    return [product(x, weight) for layer in weights for x, weight in zip(inputs, layer, strict=True)]


def _with(quantize: Callable[[Tensor], tuple[Tensor, Tensor]], fast: bool = False) -> Callable[..., Tensor]:
    """Return a product of tokens that `quantize` quantizes."""
    recipe = fp8.ScalingType.RowWise

    def product(x: Tensor, weight: Fp8Weight) -> Tensor:
        values, scales = quantize(x)
        others = weight.values.t(), scales, recipe, weight.scales.t(), recipe
        return fp8.scaled_mm(values, *others, output_dtype=x.dtype, use_fast_accum=fast)

    return product


def _tiled(tile: tuple[int, int, int]) -> Callable[..., Tensor]:
    from megatron_longctx.inference import fp8_triton

    def product(x: Tensor, weight: Fp8Weight) -> Tensor:
        default, fp8_triton.VECTOR_TILE = fp8_triton.VECTOR_TILE, tile
        try:
            return fp8_triton.vector_product(x, weight.values, weight.scales)
        finally:
            fp8_triton.VECTOR_TILE = default

    return product


def _graph(way: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays `way` from a CUDA graph, as decode does."""
    if device.type != "cuda":
        return way
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        way()
    return graph.replay


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    calls = _CALLS if device.type == "cuda" else 1
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) / calls


def _model(job: _Measurement, name: str, config: Config) -> None:
    """Compare and time both kinds of weights on one division of the ranks."""
    options, par = job.options, config.parallelism
    longest = (
        max(*options.lengths, options.prompt, options.batch * (options.lengths[0] + 64)) + 2 * options.tokens + 256
    )
    collection = groups.initialize(tensor=par.tensor_parallel_size, context=par.context_parallel_size)
    sweep = Sweep(options.lengths, (1.0,), (1,), options.rounds, options.tokens)
    benchmarks, gib = {}, {}
    for kind in KINDS:
        inference = replace(config.inference, cache_tokens=longest, weights=kind)
        of_kind = replace(config, inference=inference, data=replace(config.data, seq_length=longest))
        groups.seed_everything(1234)  # the same weights
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        benchmarks[kind] = Benchmark(of_kind, sweep, build_engine(of_kind, collection, None)[0])
        if torch.cuda.is_available():
            gib[kind] = (torch.cuda.memory_allocated() - before) / 2**30
    if gib:
        job.add(f"{name}, GiB of weights and cache", dict(gib))
    try:
        _compare(job, name, benchmarks)
        _time_prompts(job, name, benchmarks)
        for benchmark in benchmarks.values():
            randomize(benchmark.engine.model.attention)
        cases = [(1, options.lengths[0]), (options.batch, options.lengths[0]), *((1, n) for n in options.lengths[1:])]
        for batch, length in cases:
            if job.has_time(f"{name}, decode, {length:,} cached, batch {batch}"):
                _time_decode(job, name, benchmarks, batch, length)
    finally:
        for benchmark in benchmarks.values():
            benchmark.engine.release()


def _compare(job: _Measurement, name: str, benchmarks: dict[str, Benchmark]) -> None:
    """Compare logits and losses of a prompt, and logits of tokens that are decoded after it."""
    tokens = min(1500, job.options.prompt)
    logits, losses = {}, {}
    for kind, benchmark in benchmarks.items():
        draw, engine = random.Random(0), benchmark.engine
        prompt = draw.choices(range(engine.model.vocab_size), k=tokens)
        session = engine.open()
        session.scores = scores = PromptScores(prompt, 0)
        session.append(prompt)
        session.scores = None
        rows = [engine.next_logits([session])]
        for token in draw.choices(range(engine.model.vocab_size), k=4):
            session.append([token])
            rows.append(engine.next_logits([session]))
        session.close()
        logits[kind], losses[kind] = torch.cat(rows), -statistics.fmean(score.logprob for score in scores.found)
    exact, found = (logits[kind] for kind in KINDS)
    off = float((found - exact).norm() / exact.norm())
    job.add(f"{name}, loss of {tokens:,} tokens", {**losses, "logits off by": off})
    # Errors of 32 layers of random weights add up: 0.57 was found, where the losses of the text differ by 0.07%.
    if not 0 < off < 0.8:
        raise ValueError(f"logits are off by {off}: expected 0 to 0.8 of their norm")


def _time_prompts(job: _Measurement, name: str, benchmarks: dict[str, Benchmark]) -> None:
    tokens = job.options.prompt
    prompt = random.Random(1).choices(range(benchmarks["fp8"].engine.model.vocab_size), k=tokens)
    seconds: dict[str, list[float]] = {kind: [] for kind in benchmarks}
    for _ in range(1 + job.options.rounds):
        for kind, benchmark in benchmarks.items():
            session = benchmark.engine.open()
            seconds[kind].append(job.slowest(seconds_to_first(benchmark.engine, session, prompt)))
            session.close()
    job.add(f"{name}, first token of {tokens:,}", {kind: each[1:] for kind, each in seconds.items()})


def _time_decode(job: _Measurement, name: str, benchmarks: dict[str, Benchmark], batch: int, length: int) -> None:
    seconds: dict[str, list[float]] = {kind: [] for kind in benchmarks}
    sessions = {kind: [benchmark.engine.open() for _ in range(batch)] for kind, benchmark in benchmarks.items()}
    for kind, of_kind in sessions.items():
        for session in of_kind:
            benchmarks[kind].append_uncomputed(session, length)
    for _ in range(job.options.rounds):
        for kind, benchmark in benchmarks.items():
            seconds[kind].append(statistics.median(benchmark.decode(sessions[kind], length).seconds))
    for session in (each for of_kind in sessions.values() for each in of_kind):
        session.close()
    job.add(f"{name}, decode, {length:,} cached, batch {batch}", dict(seconds))


def _first_tokens(job: _Measurement, config: Config) -> None:
    """Time first tokens with tensor parallelism 2 by reduction."""
    par, options = replace(config.parallelism, tensor_parallel_size=2, context_parallel_size=1), job.options
    sized = prefill.sized(inference_config(replace(config, parallelism=par)), max(options.prompts) + 64)
    names = tuple(prefill.DEFAULT.split(","))

    def save(results: prefill.Results) -> None:
        for tokens in dict.fromkeys(each.tokens for each in results.measured):
            name = f"TP 2, first token of {tokens:,} by reduction"
            if name not in job.results.cells:
                job.add(name, {m.reduction: m.seconds for m in results.measured if m.tokens == tokens})

    found = prefill.measure(job.rank, sized, prefill.Options(options.prompts, names, options.rounds), save)
    for name, words in (*found.auto.items(), *found.left_out.items()):
        job.results.notes[f"first tokens, {name}"] = words
        job.say(f"{name}: {words}")
