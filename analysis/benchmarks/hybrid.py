"""A model of Qwen3-Next's layers: contiguous tokens with `helper`, beside zigzag with Megatron's own gated delta nets.

Three of four layers are gated delta nets. Sizes are of Qwen3-Next-80B-A3B, with a dense MLP in the place of its
experts, and with a sixth of its vocabulary for 8 of its 48 layers. A step is forward, backward (layers are recomputed)
and the sum of gradients over ranks, without an optimizer. The same whole step on one GPU is equal work: 100% of it
means that n ranks have n times its tokens per second.

Processes compile the kernels of all contenders at once, into the caches on disk, while the ranks start. Each of
fla-core's kernels is chosen among 3 of its configurations only, for all contenders alike.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
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
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.core.comm import gather_objects
from megatron_longctx.mcore import groups, spec
from megatron_longctx.mcore.data import TrainingBatch
from megatron_longctx.mcore.delta_net import GatedDeltaNet
from megatron_longctx.mcore.model import build_model, transformer_config
from megatron_longctx.mcore.pack import Pack
from megatron_longctx.mcore.sequence import ShardedSequence, build_sequence
from megatron_longctx.mcore.step import token_losses
from megatron_longctx.testing.references import dense_attention
from megatron_longctx.training.calibrate.measure import mean_seconds
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import Ranks, run_on_ranks

from .cases import _drawn_documents
from .report import Report, add_ranks, check_least, numbers, table

HELPER, MEGATRON, ALONE = "contiguous, helper", "zigzag, all-to-all", "one GPU"
_PARTS = ("recurrent", "attention", "mlp")
_SIZES = {
    "model.hidden_size": 2048, "model.num_attention_heads": 16, "model.num_kv_heads": 2, "model.head_dim": 256,
    "model.ffn_hidden_size": 5120, "model.linear_num_key_heads": 16, "model.linear_num_value_heads": 32,
    "model.linear_key_head_dim": 128, "model.linear_value_head_dim": 128, "model.num_layers": 8,
}  # fmt: skip
_TINY = {
    "model.hidden_size": 64, "model.num_attention_heads": 4, "model.num_kv_heads": 2, "model.head_dim": 16,
    "model.ffn_hidden_size": 128, "model.linear_num_key_heads": 2, "model.linear_num_value_heads": 4,
    "model.linear_key_head_dim": 16, "model.linear_value_head_dim": 16, "model.num_layers": 4,
}  # fmt: skip
_VOCABULARY = 25_600
_COMPILE_S = 110
_CONFIGURATIONS = 3  # of a Triton kernel
_CHECKED = {"dense": (1607,), "pack": (400, 1, 1, 2, 700, 3, 500), "documents of 1": (1,) * 64 + (1542, 1)}


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
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    if arguments.only:
        name, _, kind = arguments.only.partition(":")
        chosen = ((4096,), _drawn_documents(4096, 8, 0))
        packs = chosen if kind == "all" else (chosen[kind == "pack"],)
        run_on_ranks(ranks, measure, ranks, replace(options, packs=packs, rounds=0, only=name), save)
        return
    with tempfile.TemporaryDirectory() as folder:
        if ranks.device == "cuda":
            options = replace(options, compiled=tuple(_compile_ahead(ranks.count, Path(folder))))
        run_on_ranks(ranks, measure, ranks, options, save)


def _compile_ahead(ranks: int, folder: Path) -> Iterator[Path]:
    """Start processes that compile; yield a file for each, which exists once the process has ended or is late."""
    jobs = (f"{HELPER}:all", f"{ALONE}:all", f"{MEGATRON}:dense", f"{MEGATRON}:pack")
    for number, job in enumerate(jobs):
        ended, log = folder / f"{number}.ended", folder / f"{number}.log"
        command = [sys.executable, "-m", "analysis.benchmarks", "hybrid", "--only", job, "--ranks", str(ranks)]
        command += ["--out", str(folder / f"{number}.json")]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        threading.Thread(target=_await, args=(process, ended, log, job), daemon=True).start()
        yield ended


def _await(process: subprocess.Popen[bytes], ended: Path, log: Path, job: str) -> None:
    try:
        code = process.wait(_COMPILE_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        code = process.wait()
    if code:
        print(f"compiling {job} ended with {code}: {log.read_text()[-2000:]}", flush=True)
    ended.touch()


def record(
    report: Report, ranks: int, options: Options, checks: Sequence[dict[str, Any]], cells: Sequence[Cell]
) -> str:
    """Write the results so far; return the table."""
    alone = {cell.documents: cell.tokens_per_s for cell in cells if cell.name == ALONE}
    rows = []
    for cell in cells:
        speed, base = cell.tokens_per_s, alone.get(cell.documents)
        share = "" if not speed or not base or cell.name == ALONE else f"{speed / base / ranks:.0%}"
        gib = "" if cell.peak_bytes is None else f"{cell.peak_bytes / 2**30:.1f}"
        parts = [f"{cell.parts_s[part]:.3f}" if part in cell.parts_s else "" for part in _PARTS]
        text = f"{speed:,.0f}" if speed else f"not possible: {cell.error}"
        rows.append([f"{sum(cell.documents):,}", str(len(cell.documents)), cell.name, text, share, gib, *parts])
    head = ["tokens", "documents", "layers", "tokens/s", "of one GPU at equal work", "GiB", *(f"{p} s" for p in _PARTS)]
    text = table(head, rows)
    data = {
        "ranks": ranks,
        "options": asdict(options) | {"compiled": len(options.compiled)},
        "sizes": _TINY if options.tiny else _SIZES | {"vocabulary": _VOCABULARY},
        "checks": list(checks),
        "cells": [asdict(cell) | {"tokens_per_s": cell.tokens_per_s} for cell in cells],
    }
    return report.write(data, text)


def measure(rank: int, ranks: Ranks, options: Options, save: Callable[..., str]) -> None:
    """Run on every rank: the checks, then every pack with every contender."""
    began = time.monotonic()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    _compile_little()
    collection = groups.initialize(context=ranks.count)
    alone = copy.copy(collection)
    alone.cp = [dist.new_group([each]) for each in range(ranks.count)][rank]

    def tell(text: str) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    checks: list[dict[str, Any]] = []
    cells: list[Cell] = []
    options = replace(options, kernel=_usable_kernel(alone, options, ranks, tell))
    models = contenders(collection, alone, options, ranks, tell)
    while not all(path.exists() for path in options.compiled):
        time.sleep(0.2)
    dist.barrier()
    tell("kernels are compiled")
    for pg in () if options.only else (alone, collection):
        for name, documents in _CHECKED.items():
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


def _compile_little() -> None:
    """Measure few configurations of each Triton kernel, and compile torch's functions once for all lengths."""
    torch._dynamo.config.assume_static_by_default = False
    torch._dynamo.config.suppress_errors = True
    if not torch.cuda.is_available():
        return
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    prune = Autotuner.prune_configs

    def few(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        found = prune(self, kwargs)
        count = min(len(found), _CONFIGURATIONS)
        return [found[round(i * (len(found) - 1) / max(1, count - 1))] for i in range(count)]

    Autotuner.prune_configs = few
    Autotuner.do_bench = property(lambda _: partial(do_bench, warmup=2, rep=8))


def _usable_kernel(alone: ProcessGroupCollection, options: Options, ranks: Ranks, tell: Any) -> str:
    """Return `auto` if the kernel that it chooses computes attention of these heads, or else `flash`."""
    config = _config(options.tiny, 1, ranks.device == "cuda")
    model, dtype = config.model, torch.bfloat16 if ranks.device == "cuda" else torch.float32
    heads = (model.num_attention_heads, model.num_kv_heads, model.num_kv_heads)
    qkv = [torch.randn(512, 1, h, model.kv_channels, device=ranks.local_device, dtype=dtype) for h in heads]
    leaves = [x.requires_grad_() for x in qkv]
    grad = torch.randn_like(qkv[0])
    try:
        out = build_sequence(config, alone.cp).attention(*leaves, mask=512)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        expected = dense_attention(*(x.detach().cpu() for x in (*qkv, grad))).values()
        errors = [float((x.cpu() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]
        tell(f"attention's errors with the kernel auto: {errors}")
        return "auto" if all(each < 2e-2 for each in errors) else "flash"
    except Exception:
        tell(f"attention's kernel is flash, because auto fails: {traceback.format_exc(limit=-3)}")
        return "flash"


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


def _config(tiny: bool, world: int, cuda: bool) -> Config:
    sizes = _TINY if tiny else _SIZES
    precision, device = ("bf16", "cuda") if cuda else ("fp32", "cpu")
    return compose_config([
        "model=tiny_hybrid", *(f"{key}={value}" for key, value in sizes.items()), "model.implementation=local",
        f"parallelism.context_parallel_size={world}", f"train.precision={precision}", f"train.device={device}",
        "data.seq_length=65536", "recompute.mode=layer", "recompute.head_chunk_tokens=8192",
    ])  # fmt: skip


def _contender(
    name: str, pg: ProcessGroupCollection, schedule: str, layout: str, options: Options, cuda: bool
) -> Contender:
    config = _config(options.tiny, pg.cp.size(), cuda)
    parallelism = replace(config.parallelism, schedule=schedule, layout=layout)
    config = replace(config, parallelism=parallelism, attention=replace(config.attention, kernel=options.kernel))
    vocabulary = 512 if options.tiny else _VOCABULARY
    sequence = build_sequence(config, pg.cp)
    build = partial(build_model, config, transformer_config(config), pg, sequence, vocabulary)
    if name == MEGATRON:
        from .megatron_delta_net import with_megatrons

        with patch.object(spec, "with_delta_net", with_megatrons):
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
            step = partial(_step, one, batch)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                if turn < 0:
                    cell.loss, cell.gradient_norm = step(values=True)
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
    positions = torch.cat([torch.arange(length) for length in documents])[None]
    return TrainingBatch(words[:1], words[1:], torch.ones(1, sum(documents)), positions, tuple(documents))


def _step(one: Contender, batch: TrainingBatch, values: bool = False) -> tuple[float, float] | None:
    """Run a step; return the mean loss and the norm of the summed gradients if these are asked for."""
    losses, _, _ = token_losses(batch, one.model, one.sequence)
    loss = losses.float().sum() / batch.tokens.shape[1]
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in one.model.parameters() if p.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients]) if one.ranks > 1 or values else None
    if one.ranks > 1:
        dist.all_reduce(flat, group=one.group)
    if not values:
        return None
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
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


def check_layer(
    pg: ProcessGroupCollection, alone: ProcessGroupCollection, documents: tuple[int, ...], ranks: Ranks, tiny: bool
) -> dict[str, Any]:
    """Return errors of a layer over ranks, relative (Frobenius) to the reference recurrence in fp64 on one rank.

    by_kernels: of fla-core's kernels in bf16. by_torch: of the reference recurrence with the same bf16 weights and
    inputs. Both for the output and the gradients of the input and of every weight.
    """
    layer, pack = _layer(pg, documents, ranks, tiny)
    one, whole = _layer(alone, documents, ranks, tiny)
    one.load_state_dict(layer.state_dict())
    one.double()._by_kernels = one._by_torch
    generator, total = torch.Generator().manual_seed(1), sum(documents)
    x, grad = torch.randn(2, total, 1, layer.config.hidden_size, generator=generator).to(layer.conv_weight)
    tokens = pack.tokens(x.device)

    def results() -> dict[str, Tensor]:
        out, of_input, *of_weights = _gradients(layer, x[tokens], grad[tokens], pack)
        sums = [torch.zeros_like(x, dtype=torch.float64).index_copy(0, tokens, each) for each in (out, of_input)]
        for each in (*sums, *of_weights):
            dist.all_reduce(each, group=pg.cp)
        return dict(zip(names, (*sums, *of_weights), strict=True))

    names = ["out", "input", *(name for name, _ in layer.named_parameters())]
    truth = dict(zip(names, _gradients(one, x.double(), grad.double(), whole), strict=True))
    found = {"by_kernels": results()}
    layer._by_kernels = layer._by_torch
    found["by_torch"] = results()
    return {
        kind: {name: float((each - truth[name]).norm() / truth[name].norm()) for name, each in values.items()}
        for kind, values in found.items()
    }


def _layer(pg: ProcessGroupCollection, documents: tuple[int, ...], ranks: Ranks, tiny: bool) -> tuple[Any, Pack]:
    """Build a gated delta net over the ranks of `pg`, with the same weights every time, and a pack for it."""
    config = _config(tiny, pg.cp.size(), ranks.device == "cuda")
    sequence, megatron = build_sequence(config, pg.cp), transformer_config(config)
    of_layer = spec.block_spec(megatron, sequence, transformer_engine=False).layer_specs[0].submodules.self_attention
    torch.manual_seed(0)
    layer = build_module(of_layer, config=megatron, layer_number=1, pg_collection=pg)
    assert type(layer) is GatedDeltaNet
    return layer.to(ranks.local_device), sequence.pack(documents)


def _gradients(layer: GatedDeltaNet, x: Tensor, grad: Tensor, pack: Pack) -> list[Tensor]:
    """Return the output and the gradients of input and weights, in fp64."""
    x = x.detach().requires_grad_()
    out = layer(x, packed_seq_params=pack)[0]
    return [each.double() for each in (out.detach(), *torch.autograd.grad(out, (x, *layer.parameters()), grad))]
