"""Decode and prompts with weights that ranks share (inference.shard_weights), beside all of them on every rank, and TP.

Weights are random, the same in all three ways, which first generate the same tokens in fp32. The benchmark starts its
ranks itself: as many as `parallelism.context_parallel_size`, by default 2, on a model that is by default Llama 3 8B's.
"""

import argparse
import random
import statistics
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.config.cluster import GIB
from megatron_longctx.core.comm import gather_objects
from megatron_longctx.inference.cached_attention import CachedAttention
from megatron_longctx.inference.choose_cache_mode import Chooser
from megatron_longctx.inference.engine import LongContextEngine
from megatron_longctx.inference.sampling import Sampling
from megatron_longctx.inference.session import NextToken, Session
from megatron_longctx.mcore import groups
from megatron_longctx.mcore.inference import CachedGPT, build_engine, inference_config
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import Ranks, run_on_ranks, world_group

from .inference_ranks import RewindableCacheManager, seconds_to_first, wait_for_all
from .report import Report, numbers, table

DEFAULTS = (
    "model=llama3_8b",
    "model.implementation=local",
    "train.precision=bf16",
    "parallelism.context_parallel_size=2",
)
WAYS = ("all weights on each rank", "shared weights", "tensor parallelism")
_ROUNDS = 3
_KEPT_BYTES = 11 * GIB
"""The memory that prompts and their merges need beside weights and cache."""
_PROMPT, _NEW = 700, 24
"""The tokens of the prompt, and generated after it, that all ways must agree on."""


@dataclass(frozen=True)
class Options:
    """What to measure, and the seconds after which nothing more begins."""

    decode: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    tokens: int
    seconds: float
    checked_layers: int


@dataclass
class Results:
    """Lines of every kind of measurement, keyed by their columns."""

    agreement: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    decode: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


Save = Callable[[Results], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", help=f"group=NAME and key=value, after {' '.join(DEFAULTS)}")
    parser.add_argument("--lengths", default="1024,131072,1048576", help="cached tokens (default: %(default)s)")
    parser.add_argument("--batches", default="1,8,32", help="sequences decoded together (default: %(default)s)")
    parser.add_argument("--prompts", default="16384,131072", help="prompts' tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens of a round (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=180.0, help="begin nothing later (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 layers, short sequences, 8 tokens")


def run(arguments: argparse.Namespace) -> None:
    """Measure; write JSON and a Markdown table after every measurement."""
    settings = [*DEFAULTS, *arguments.settings, *(["model.num_layers=2"] if arguments.quick else [])]
    config = inference_config(compose_config(settings))
    lengths, batches = (numbers("--lengths", arguments.lengths, 2), numbers("--batches", arguments.batches, 1))
    prompts = numbers("--prompts", arguments.prompts, 2)
    if arguments.quick:
        lengths, prompts = lengths[:2], prompts[:1]
    cells = tuple((length, batch) for length in lengths for batch in batches)
    tokens = 8 if arguments.quick else arguments.tokens
    layers = min(2, config.model.num_layers)
    options = Options(cells, prompts, tokens, arguments.seconds, layers)
    par = config.parallelism
    ranks = Ranks.of(par.context_parallel_size * par.tensor_parallel_size, config.train.device)
    what = "weights of each rank, and times of the slowest rank in seconds, with random weights"
    about = f"{config.model.name}, {config.model.num_layers} layers, {config.train.precision}, {ranks.count} ranks"
    report = Report(arguments.out, ranks.device, what, about, "random weights; medians in ms, of the slowest rank")
    results = run_on_ranks(ranks, measure, config, options, partial(record, report, config, options))
    print(tables(results))


def record(report: Report, config: Config, options: Options, results: Results) -> None:
    data = {"model": asdict(config.model), "precision": config.train.precision, "options": asdict(options)}
    report.write({**data, **asdict(results)}, tables(results))


def tables(results: Results) -> str:
    """Return Markdown with times in milliseconds."""
    agreement = ", ".join(f"{key}: {value}" for key, value in results.agreement.items())
    weights = [[way, f"{count / GIB:.3g}"] for way, count in results.weights.items()]
    parts = [f"Agreement: {agreement}", "", table(["way", "GiB of weights on each rank"], weights)]
    for title, rows, keys in (
        ("Time between tokens, over random keys and values", results.decode, ("cached", "batch")),
        ("Time to first token", results.prompts, ("tokens",)),
    ):
        cells = [
            [
                *(f"{row[key]:,}" for key in keys),
                *(f"{row['seconds'][way] * 1e3:.2f}" for way in WAYS),
                f"{row['seconds'][WAYS[0]] / row['seconds'][WAYS[1]]:.2f}",
            ]
            for row in rows
        ]
        parts += ["", title, "", table([*keys, *WAYS, "shared, times faster"], cells)]
    return "\n".join([*parts, *([""] if results.failures else []), *results.failures])


def measure(rank: int, config: Config, options: Options, save: Save) -> Results:
    """Measure with the same weights in every way; rank 0 calls `save` after every measurement."""
    begin, results = time.perf_counter(), Results()
    bench = _Benchmark(config, options, results)

    def left() -> bool:  # rank 0 decides for all
        return gather_objects(world_group(), time.perf_counter() - begin < options.seconds)[0]

    exact = replace(config.train, precision="fp32")
    narrow: dict[str, Any] = (
        {"hidden_size": 1024, "head_dim": 64, "ffn_hidden_size": 4096} if config.model.hidden_size > 1024 else {}
    )
    few = replace(config.model, num_layers=options.checked_layers, **narrow)
    small = replace(config, train=exact, model=few)
    cells: list[tuple[str, Callable[[], object]]] = [("agreement in fp32", lambda: bench.agree(small, True))]
    cells += [("agreement", lambda: bench.agree(config, False))]
    timed = [(c * b, f"{c:,} cached, batch {b}", partial(bench.decode, c, b)) for c, b in options.decode]
    timed += [(2 * count, f"a prompt of {count:,}", partial(bench.prompt, count)) for count in options.prompts]
    cells += [(name, cell) for _, name, cell in sorted(timed, key=lambda each: each[0])]
    for name, cell in cells:
        if not left():
            results.failures.append(f"{name}: no time left")
            continue
        try:
            cell()
        except Exception as error:  # the next cell may work
            traceback.print_exc()
            results.failures.append(f"{name}: {type(error).__name__}: {error}".split("\n")[0])
            _say(results.failures[-1])
        if rank == 0:
            save(results)
    bench.release()
    return results


def _say(line: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(line, flush=True)


def _sizes(config: Config) -> dict[str, Config]:
    """Return the configuration of every way."""
    par, inference = config.parallelism, config.inference
    ranks = par.context_parallel_size * par.tensor_parallel_size
    alone = replace(par, context_parallel_size=1, tensor_parallel_size=ranks)
    small = replace(inference, cache_tokens=4 * (_PROMPT + _NEW))
    shared = replace(small, shard_weights=True)
    return {
        WAYS[0]: replace(config, inference=small),
        WAYS[1]: replace(config, inference=shared),
        WAYS[2]: replace(config, inference=small, parallelism=alone),
    }


def _build(config: Config) -> LongContextEngine:
    """Build an engine whose weights depend on the model alone. Its groups stay when others are made."""
    groups._stale.clear()
    collection = groups.from_config(config.parallelism)
    engine, _ = build_engine(config, collection, None)
    assert isinstance(engine.model, CachedGPT)
    _fill(engine.model._gpt, config.model.init_std)
    groups.destroy()
    groups._stale.clear()
    return engine


@torch.no_grad()
def _fill(gpt: Any, std: float) -> None:
    for name, parameter in gpt.named_parameters():
        if parameter.ndim == 1:
            continue
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        world, rank = gpt.pg_collection.tp.size(), gpt.pg_collection.tp.rank()
        dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape: list[int] = list(parameter.shape)
        if dim >= 0:
            shape[dim] *= world
        whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device).normal_(std=std, generator=generator)
        if dim >= 0 and "linear_fc1" in name and gpt.config.gated_linear_unit:  # gates, then values
            whole = torch.cat([half.chunk(world)[rank] for half in whole.chunk(2)])
        elif dim >= 0:
            whole = whole.chunk(world, dim)[rank]
        parameter.copy_(whole)


class _Benchmark:
    """Engines of all ways over one memory of keys and values, of which they use one part after another."""

    def __init__(self, config: Config, options: Options, results: Results) -> None:
        self._config, self._options, self._results = config, options, results
        self._random = random.Random(0)  # the same on every rank
        self._engines: dict[str, LongContextEngine] = {}
        self._managers: dict[str, RewindableCacheManager] = {}
        self._pool: list[Tensor] = []

    def release(self) -> None:
        for engine in self._engines.values():
            engine.release()

    def agree(self, config: Config, exact: bool) -> None:
        """Generate with all ways, and compare their tokens and the logits after the prompt."""
        prompt = random.Random(1).choices(range(256), k=_PROMPT)
        found: dict[str, list[int]] = {}
        logits: dict[str, Tensor] = {}
        for way, sizes in _sizes(config).items():
            begin, engine = time.perf_counter(), _build(sizes)
            session = engine.open()
            session.append(prompt)
            logits[way] = engine.next_logits([session])[0].clone()
            found[way] = session.generate(Sampling(max_new_tokens=_NEW))
            session.append(prompt[:9])  # a short prompt after cached tokens, as a step on GPUs
            found[way] += session.generate(Sampling(max_new_tokens=4))
            session.close()
            shares = engine.model._shares  # type: ignore[attr-defined]
            sums = "" if shares is None else f", sums over {'collectives' if shares.peers is None else 'peer memory'}"
            _say(f"{way}: {time.perf_counter() - begin:.1f} s to build and generate, {engine.decoding}{sums}")
            if exact:
                engine.release()
            else:
                self._engines[way] = engine
                counted = {id(p): p.numel() * p.element_size() for p in engine.model._gpt.parameters()}  # type: ignore[attr-defined]
                self._results.weights[way] = sum(counted.values())
                _say(f"{way}: {self._results.weights[way] / GIB:.2f} GiB of weights on each rank")
            del engine
        first = found[WAYS[0]]
        precision, others = config.train.precision, WAYS[1:]
        for way in others:
            same = sum(a == b for a, b in zip(first, found[way], strict=True))
            off = float((logits[way] - logits[WAYS[0]]).norm() / logits[WAYS[0]].norm())
            text = f"{same} of {len(first)} tokens equal, logits differ by {off:.1e}"
            self._results.agreement[f"{precision}, {config.model.num_layers} layers, {way}"] = text
            _say(f"{precision}, {config.model.num_layers} layers, {way}: {text}")
            if exact and (same < len(first) or off > 1e-4):
                raise ValueError(f"{way} generates other tokens than {WAYS[0]}: {found[way]}, not {first}.")
        if not exact:
            self._share_memory()

    def _share_memory(self) -> None:
        """Give all engines the same memory for keys and values, as much of it as cells need or the device has."""
        options, attention = self._options, self._engines[WAYS[0]].model.attention
        per_token = attention.shape.token_bytes // attention.world  # on average over ranks; equal in all ways
        needed = max((length + 2 * options.tokens + 600) * batch for length, batch in options.decode)
        needed = max(needed, *options.prompts) + 4096
        for engine in self._engines.values():
            engine.model.attention._storage, engine.model.attention.layers = [], []
        free = float(GIB)
        if attention.device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0] - _KEPT_BYTES
        needed = min(needed, *gather_objects(world_group(), int(free / per_token)))
        per_layer = needed * per_token // attention.shape.num_layers // attention.shape.dtype.itemsize
        self._pool = [
            torch.empty(per_layer, dtype=attention.shape.dtype, device=attention.device).normal_()
            for _ in range(attention.shape.num_layers)
        ]
        _say(f"{needed:,} tokens fit into the cache of all ranks")
        for way, engine in self._engines.items():
            page, n = engine.settings.page_tokens, engine.model.attention.world
            pages = int(needed // n // page) - 1
            _use(engine.model.attention, self._pool, pages * page)
            self._managers[way] = manager = RewindableCacheManager(n, pages, page)
            chooser = Chooser(engine.model.attention.shape.workload)
            self._engines[way] = LongContextEngine(engine.model, manager, chooser, engine.settings)

    @contextmanager
    def _cached(self, way: str, length: int, batch: int) -> Iterator[list[Session]]:
        """Sessions whose tokens are in the cache without being computed."""
        engine, manager = self._engines[way], self._managers[way]
        sessions = [engine.open() for _ in range(batch)]
        try:
            for session in sessions:
                manager.append({session.number: length})
                session.tokens += [7] * length
                session.next_token = NextToken()
            manager.keep()
            yield sessions
        finally:
            for session in sessions:
                session.close()

    def decode(self, length: int, batch: int) -> None:
        """Measure the time between tokens, of all ways in turn."""
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(1 + _ROUNDS):
            for way in WAYS:
                with self._cached(way, length, batch) as sessions:
                    seconds[way].append(self._round(way, sessions, self._options.tokens if number else 3))
        medians = {way: statistics.median(found[1:]) for way, found in seconds.items()}
        self._results.decode.append({"cached": length, "batch": batch, "seconds": medians, "all": seconds})
        _say(f"{length:,} cached, batch {batch}: " + _in_ms(medians))

    def _round(self, way: str, sessions: list[Session], tokens: int) -> float:
        """Return the mean seconds between tokens on the slowest rank."""
        engine = self._engines[way]
        generations = [engine.start(s, Sampling(max_new_tokens=tokens + 3), i) for i, s in enumerate(sessions)]
        engine.step(generations)
        engine.step(generations)
        wait_for_all(engine.model.attention.device)
        begin = time.perf_counter()
        for _ in range(tokens):
            engine.step(generations)  # ends with the tokens on the host
        seconds = (time.perf_counter() - begin) / tokens
        self._managers[way].rewind(sessions)
        return max(gather_objects(world_group(), seconds))

    def prompt(self, tokens: int) -> None:
        """Measure the time to first token, of all ways in turn."""
        text = self._random.choices(range(self._engines[WAYS[0]].model.vocab_size), k=tokens)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        warm = [text[: min(tokens, 16_384)]] if tokens > 16_384 else [text]
        for number, each in enumerate([*warm, *[text] * _ROUNDS]):
            for way in WAYS:
                session = self._engines[way].open()
                try:
                    found = seconds_to_first(self._engines[way], session, each)
                finally:
                    session.close()
                if number:
                    seconds[way].append(max(gather_objects(world_group(), found)))
        medians = {way: statistics.median(found) for way, found in seconds.items()}
        self._results.prompts.append({"tokens": tokens, "seconds": medians, "all": seconds})
        _say(f"a prompt of {tokens:,}: " + _in_ms(medians))


def _use(attention: CachedAttention, pool: Sequence[Tensor], slots: int) -> None:
    """Let an attention keep its keys and values in `pool`."""
    like = attention.shape.kv.spec(slots + 1, 1, attention.shape.num_kv_heads, attention.device)
    size = torch.Size(like.shape).numel()
    attention._storage = [layer[:size].view(like.shape) for layer in pool]
    attention.layers = [storage[:slots] for storage in attention._storage]
    attention.unused_slots = slots, slots


def _in_ms(medians: dict[str, float]) -> str:
    times = ", ".join(f"{way} {seconds * 1e3:.2f} ms" for way, seconds in medians.items())
    return f"{times}; shared {medians[WAYS[0]] / medians[WAYS[1]]:.2f} times as fast as all on each"
