"""A model of Qwen3-Next's layers: contiguous tokens with `helper`, beside zigzag with Megatron's own gated delta nets.

Three of four layers are gated delta nets. Sizes are of Qwen3-Next-80B-A3B, with a dense MLP in the place of its
experts, and with a sixth of its vocabulary for 8 of its 48 layers. A step is forward, backward (layers are recomputed)
and the sum of gradients over ranks, without an optimizer. The same whole step on one GPU is equal work: 100% of it
means that n ranks have n times its tokens per second.

Processes compile the kernels of all contenders at once, into the caches on disk, while the ranks start. Each of
fla-core's kernels is chosen among 3 of its configurations only, for all contenders alike.
"""

import argparse
import copy
import gc
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_longctx.core.comm import gather_objects
from megatron_longctx.mcore import groups, spec
from megatron_longctx.mcore.data import TrainingBatch
from megatron_longctx.mcore.delta_net import GatedDeltaNet
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.sequence import ShardedSequence, build_sequence
from megatron_longctx.mcore.step import token_losses
from megatron_longctx.training.measure import mean_seconds
from megatron_longctx.training.ranks import Ranks, run_on_ranks

from .cases import _drawn_documents
from .compile_ahead import compile_ahead, compile_little, use_caches
from .hybrid_model import CHECKED, SIZES, TINY, check_layer, config_of, usable_kernel
from .report import Report, add_ranks, check_least, numbers, table

HELPER, MEGATRON, ALONE = "contiguous, helper", "zigzag, all-to-all", "one GPU"
_COMPILED = (f"{HELPER}:all", f"{ALONE}:all", f"{MEGATRON}:dense", f"{MEGATRON}:pack")
_PARTS = ("recurrent", "attention", "mlp")
_VOCABULARY = 25_600


@dataclass
class Cell:
    """What a contender took for one sequence."""

    name: str
    documents: tuple[int, ...]
    rounds: list[float] = field(default_factory=list)  # seconds of a step, on the slowest rank
    parts_s: dict[str, float] = field(default_factory=dict)  # of one step, forward and backward, on the slowest rank
    peak_bytes: int | None = None  # of the allocator, without the other contenders' weights
    loss: float | None = None
    gradient_norm: float | None = None
    error: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        return sum(self.documents) / statistics.median(self.rounds) if self.rounds else None


@dataclass(frozen=True)
class Options:
    """What to measure: packs of documents, rounds, whether with tiny sizes, and seconds after which none begins.

    only: the one contender of a process that compiles kernels. compiled: files that such processes leave. kernel: of
    attention.
    """

    packs: tuple[tuple[int, ...], ...]
    rounds: int
    tiny: bool
    budget: float
    only: str | None = None
    kernel: str = "auto"
    compiled: tuple[Path, ...] = ()


class Contender(NamedTuple):
    """A model with its sequence. ranks: that share the sequence."""

    name: str
    model: Any
    sequence: ShardedSequence
    group: dist.ProcessGroup
    ranks: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser)
    parser.add_argument("--tokens", default="65536,131072", help="of every sequence (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=24, help="of a pack (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of every contender, interleaved (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny layers, for CPUs")
    parser.add_argument("--quick", action="store_true", help="the checks, and one round of 16K tokens")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # of processes that compile
    parser.add_argument("--budget", type=float, default=170, help="begin no cell later, seconds (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Check the layer, measure, print a line for every result, and write JSON and Markdown after every cell."""
    for name in ("documents", "rounds"):
        check_least(f"--{name}", getattr(arguments, name))
    lengths = (16384,) if arguments.quick else numbers("--tokens", arguments.tokens, 1024)
    packs = tuple(each for n in lengths for each in ((n,), _drawn_documents(n, arguments.documents, 0)))
    options = Options(packs, 1 if arguments.quick else arguments.rounds, arguments.tiny, arguments.budget)
    ranks = Ranks.of(arguments.ranks, arguments.device)
    unit = f"{ranks.count} ranks; forward, backward with recomputed layers, sum of gradients"
    about = "8 layers of Qwen3-Next-80B-A3B with dense MLPs, 3 of 4 recurrent"
    report = Report(arguments.out, ranks.device, "seconds of steps of a hybrid model", about, unit)
    save = partial(record, report, ranks.count, options)
    use_caches()
    if arguments.only:
        name, _, kind = arguments.only.partition(":")
        chosen = ((4096,), _drawn_documents(4096, 8, 0))
        packs = chosen if kind == "all" else (chosen[kind == "pack"],)
        run_on_ranks(ranks, measure, ranks, replace(options, packs=packs, rounds=0, only=name), save)
        return
    with tempfile.TemporaryDirectory() as folder:
        if ranks.device == "cuda":
            options = replace(options, compiled=tuple(compile_ahead(_COMPILED, ranks.count, Path(folder))))
        run_on_ranks(ranks, measure, ranks, options, save)


def record(
    report: Report, ranks: int, options: Options, checks: Sequence[dict[str, Any]], cells: Sequence[Cell]
) -> str:
    """Write the results so far; return the table."""
    alone = {cell.documents: cell.tokens_per_s for cell in cells if cell.name == ALONE}
    rows, recorded = [], []
    for cell in cells:
        speed, base = cell.tokens_per_s, alone.get(cell.documents)
        percent = 100 * speed / base / (1 if cell.name == ALONE else ranks) if speed and base else None
        of_pack = {"tokens": sum(cell.documents), "count": len(cell.documents)}
        recorded.append(asdict(cell) | of_pack | {"tokens_per_s": speed, "percent_of_one_gpu": percent})
        share = "" if percent is None else f"{percent:.1f}%"
        gib = "" if cell.peak_bytes is None else f"{cell.peak_bytes / 2**30:.1f}"
        parts = [f"{cell.parts_s[part]:.3f}" if part in cell.parts_s else "" for part in _PARTS]
        text = f"{speed:,.0f}" if speed else f"not possible: {cell.error}"
        rows.append([f"{sum(cell.documents):,}", str(len(cell.documents)), cell.name, text, share, gib, *parts])
    head = ["tokens", "documents", "layers", "tokens/s", "of one GPU at equal work", "GiB", *(f"{p} s" for p in _PARTS)]
    text = table(head, rows)
    data = {
        "ranks": ranks,
        "options": asdict(options) | {"compiled": len(options.compiled)},
        "sizes": TINY if options.tiny else SIZES | {"vocabulary": _VOCABULARY},
        "checks": list(checks),
        "cells": recorded,
    }
    return report.write(data, text)


def measure(rank: int, ranks: Ranks, options: Options, save: Callable[..., str]) -> None:
    """Run on every rank: the checks, then every pack with every contender."""
    began = time.monotonic()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    compile_little()
    collection = groups.initialize(context=ranks.count)
    alone = copy.copy(collection)
    alone.cp = [dist.new_group([each]) for each in range(ranks.count)][rank]

    def tell(text: str) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    checks: list[dict[str, Any]] = []
    cells: list[Cell] = []
    options = replace(options, kernel=usable_kernel(alone, ranks, options.tiny, tell))
    models = contenders(collection, alone, options, ranks, tell)
    while not all(path.exists() for path in options.compiled):
        time.sleep(0.2)
    dist.barrier()
    tell("kernels are compiled")
    for pg in () if options.only else (alone, collection):
        for name, documents in CHECKED.items():
            try:
                found = check_layer(pg, alone, documents, ranks, options.tiny)
            except Exception:
                found = {"error": traceback.format_exc(limit=-3)}
            checks.append({"ranks": pg.cp.size(), "documents": name, **found})
            tell(f"check {checks[-1]}")
    for documents in options.packs:
        if max(gather_objects(collection.cp, time.monotonic() - began)) > options.budget:
            tell(f"not begun, for lack of time: {sum(documents):,} tokens, {len(documents)} documents")
            continue
        cells += measure_pack(models, documents, options, ranks.local_device, tell)
        if rank == 0:
            save(checks, cells)
    tell("\n" + (save(checks, cells) if rank == 0 else ""))
    groups.destroy()


def contenders(
    collection: ProcessGroupCollection, alone: ProcessGroupCollection, options: Options, ranks: Ranks, tell: Any
) -> list[Contender]:
    """Build the models that can be built, with equal weights."""
    kinds = ((HELPER, collection, "helper", "contiguous"), (ALONE, alone, "helper", "contiguous"))
    built = []
    for name, pg, schedule, layout in (*kinds, (MEGATRON, collection, "zigzag", "per_document")):
        if options.only not in (None, name):
            continue
        try:
            built.append(_contender(name, pg, schedule, layout, options, ranks.device == "cuda"))
            tell(f"built: {name}, {sum(p.numel() for p in built[-1].model.parameters()) / 1e6:,.0f}M parameters")
        except Exception:
            tell(f"not built: {name}: {traceback.format_exc(limit=-3)}")
    own = dict(built[0].model.named_parameters()) if built else {}
    for other in built[1:]:
        with torch.no_grad():
            for name, parameter in other.model.named_parameters():
                if name in own:
                    parameter.copy_(own[name])
        if other.name == MEGATRON:
            from .megatron_delta_net import load_from_ours

            for mine, theirs in zip(built[0].model.decoder.layers, other.model.decoder.layers, strict=True):
                if isinstance(mine.self_attention, GatedDeltaNet):
                    load_from_ours(theirs.self_attention, mine.self_attention)
    return built


def _contender(
    name: str, pg: ProcessGroupCollection, schedule: str, layout: str, options: Options, cuda: bool
) -> Contender:
    config = config_of(options.tiny, pg.cp.size(), cuda)
    parallelism = replace(config.parallelism, schedule=schedule, layout=layout)
    config = replace(config, parallelism=parallelism, attention=replace(config.attention, kernel=options.kernel))
    vocabulary = 512 if options.tiny else _VOCABULARY
    sequence = build_sequence(config, pg.cp)
    build = partial(build_model, config, transformer_config(config), pg, sequence, vocabulary)
    if name == MEGATRON:
        from .megatron_delta_net import with_megatrons

        with patch.object(spec, "with_mixer", with_megatrons):
            model = build()
    else:
        model = build()
    return Contender(name, model.to("cuda") if cuda else model, sequence, pg.cp, pg.cp.size())


def measure_pack(
    models: Sequence[Contender], documents: tuple[int, ...], options: Options, device: torch.device, tell: Any
) -> list[Cell]:
    """Measure every contender, interleaved, and then where the time of one step goes."""
    cells = [Cell(each.name, documents) for each in models]
    pairs = list(zip(models, cells, strict=True))
    batch = _batch(documents, 512 if options.tiny else _VOCABULARY)
    world = models[0].group
    for turn in range(-1, options.rounds + 1):  # the first warms up, the last asks where time goes
        for one, cell in pairs:
            if cell.error:
                continue
            others = sum(p.nbytes for each in models if each is not one for p in each.model.parameters())
            step = partial(_step, one, batch, values=turn < 0)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                if turn < 0:
                    cell.loss, cell.gradient_norm = step()
                elif turn < options.rounds:
                    dist.barrier(world)
                    seconds = mean_seconds(step, device, 1)
                    cell.rounds.append(max(gather_objects(world, seconds)))
                    if device.type == "cuda":
                        peak = max(gather_objects(world, torch.cuda.max_memory_allocated()))
                        cell.peak_bytes = max(cell.peak_bytes or 0, peak - others)
                else:
                    cell.parts_s = _parts(one, step, world)
            except Exception as error:
                cell.error = f"{type(error).__name__}: {error}".split("\n", 1)[0]
                tell(traceback.format_exc(limit=-4))
            for parameter in one.model.parameters():
                parameter.grad = None
            if cell.error or turn < 0:
                gc.collect()
                torch.cuda.empty_cache()
    for one, cell in pairs:
        speed = f"{cell.tokens_per_s:,.0f} tokens/s" if cell.tokens_per_s else cell.error
        parts = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in cell.parts_s.items())
        rounds = " ".join(f"{each:.3f}" for each in cell.rounds)
        what = f"{sum(documents):,} tokens, {len(documents)} documents, {one.name}"
        memory = f"{(cell.peak_bytes or 0) / 2**30:.1f} GiB"
        values = f"loss {cell.loss}, gradients {cell.gradient_norm}"
        tell(f"{what}: {speed} (s: {rounds}), {memory}; {parts}; {values}")
    return cells


def _batch(documents: Sequence[int], vocabulary: int) -> TrainingBatch:
    generator = torch.Generator().manual_seed(sum(documents))
    words = torch.randint(vocabulary, (2, sum(documents)), generator=generator)
    return TrainingBatch(words[:1], words[1:], torch.ones(1, sum(documents)), tuple(documents))


def _step(one: Contender, batch: TrainingBatch, values: bool = False) -> tuple[float | None, float | None]:
    """Run a step; return the mean loss and the norm of the summed gradients, or None if these are not asked for."""
    losses, _, _ = token_losses(batch, one.model, one.sequence)
    loss = losses.float().sum() / batch.tokens.shape[1]
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in one.model.parameters() if p.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients]) if one.ranks > 1 or values else None
    if one.ranks > 1:
        dist.all_reduce(flat, group=one.group)
    if not values:
        return None, None
    total = loss.detach().clone()
    dist.all_reduce(total, group=one.group)
    assert flat is not None
    return float(total), float(flat.float().norm())


class _Mark(torch.autograd.Function):
    """Notes when forward passes here, and when backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[str], None], forward: str, backward: str) -> Tensor:
        ctx.note, ctx.backward_name = note, backward
        note(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.note(ctx.backward_name)
        return grads[0], None, None, None


def _parts(one: Contender, step: Callable[[], object], world: dist.ProcessGroup) -> dict[str, float]:
    """Return the seconds of a step in gated delta nets, in attention and in MLPs, on the rank with the most."""
    cuda, marks = next(one.model.parameters()).is_cuda, {part: [] for part in _PARTS}  # type: ignore[var-annotated]

    def note(part: str, kind: str) -> None:
        at: Any = time.perf_counter()
        if cuda:
            at = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            at.record()
        marks[part].append((kind, at))

    with _marked(one.model, note):
        dist.barrier(world)
        step()
    if cuda:
        torch.cuda.synchronize()
    found = {}
    for part, events in marks.items():
        pairs = zip(events[::2], events[1::2], strict=True)  # begins and ends alternate, forward and backward
        found[part] = sum(a.elapsed_time(b) / 1e3 if cuda else b - a for (_, a), (_, b) in pairs)
    return {part: max(gather_objects(world, seconds)) for part, seconds in found.items()}


@contextmanager
def _marked(model: Any, note: Callable[[str, str], None]) -> Iterator[None]:
    marked = []
    for layer in model.decoder.layers:
        mixer = "attention" if hasattr(layer.self_attention, "core_attention") else "recurrent"
        marked += [(layer.self_attention, mixer), (layer.mlp, "mlp")]
    for module, part in marked:

        def forward(x: Tensor, *args: Any, old: Any = module.forward, part: str = part, **kwargs: Any) -> Any:
            of_part = partial(note, part)
            out, bias = old(_Mark.apply(x, of_part, "begin", "end"), *args, **kwargs)  # type: ignore[no-untyped-call]
            return _Mark.apply(out, of_part, "end", "begin"), bias  # type: ignore[no-untyped-call]

        module.forward = forward
    try:
        yield
    finally:
        for module, _ in marked:
            del module.forward
