"""Whole training steps over trees of shared beginnings beside the same rollouts as separate packed documents.

Layers, data and loss are the same: every token of a rollout after its prompt counts once for each rollout. Weights do
not change (a learning rate of 0, with all of the optimizer's work), so losses and gradient norms of both can be
compared in every round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.config import Config
from megatron_longctx.core.comm import gather_objects
from megatron_longctx.integrations.trees import to_tree
from megatron_longctx.mcore import groups, model, optimizer
from megatron_longctx.mcore.data import TrainingBatch
from megatron_longctx.mcore.sequence import build_sequence
from megatron_longctx.mcore.step import LossSum, TrainStep, local_device
from megatron_longctx.planner.flops import peak_tflops, training_flops
from megatron_longctx.training.compose import compose_config
from megatron_longctx.training.ranks import Ranks, world_group

if TYPE_CHECKING:
    from .rollouts import Rollouts
    from .trees import Options

_MODEL = ("model=llama3_8b", "model.num_layers=4", "model.vocab_size=32768", "model.implementation=local")
_RUN = (
    *("data.packing=best_fit", "recompute.head_chunk_tokens=8192", "train.global_batch_size=1"),
    *("train.save=false", "logging.wandb=disabled"),
)
_LIMITS = {torch.bfloat16: (2e-3, 2e-2), torch.float32: (1e-5, 1e-4)}
"""The most by which a tree's loss and gradient norm differ from those of its rollouts apart, relatively."""


def measure(
    rank: int, ranks: Ranks, options: Options, some: Sequence[Rollouts], tell: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Measure steps over every tree, and over a pack that shares nothing."""
    trainer = _Trainer(_config(ranks, options))
    group = world_group()
    try:
        cells = [(each.name, partial(_tree, each, trainer, options)) for each in some]
        # The last tree takes as long as all others.
        cells.insert(-1, ("nothing shared", partial(_nothing_shared, trainer, options)))
        for name, cell in cells:
            if not options.late(group):
                tell(caught(cell, "steps", name))
    finally:
        groups.destroy()


def caught(cell: Callable[[], list[dict[str, Any]]], part: str, name: str) -> list[dict[str, Any]]:
    """Return a cell's lines, or its error as one: cells that do not fit into memory must not end the others."""
    try:
        return cell()
    except (RuntimeError, ValueError) as error:
        return [{"part": part, "tree": name, "what": f"failed: {type(error).__name__}: {error}".split("\n")[0][:300]}]
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _config(ranks: Ranks, options: Options) -> Config:
    precision = "bf16" if ranks.device == "cuda" else "fp32"
    return compose_config([
        *_MODEL, *_RUN, f"train.precision={precision}", f"train.device={ranks.device}", "parallelism=single",
        f"parallelism.context_parallel_size={ranks.count}", f"parallelism.schedule={options.mode}",
        f"data.seq_length={options.pack_tokens // ranks.count * ranks.count}", *options.settings,
    ])  # fmt: skip


class _Trainer:
    """A model with its optimizer, and steps of any micro-batches."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.groups = groups.from_config(config.parallelism, config.train.seed)
        self.sequence = build_sequence(config, self.groups.cp)
        self.vocab_size = model.padded_vocab_size(config.model, 256)
        megatron = model.transformer_config(config)
        gpt = model.build_model(config, megatron, self.groups, self.sequence, self.vocab_size)
        self.models = optimizer.wrap_ddp([gpt], megatron, self.groups, distributed=config.optim.distributed)
        self.optimizer = optimizer.build_optimizer(self.models, config.optim, self.groups)
        optimizer.connect(megatron, self.models, self.optimizer)
        for each in self.optimizer.param_groups:
            each["lr"] = 0.0

    def step(self, batches: Sequence[TrainingBatch]) -> tuple[LossSum, float]:
        """Return the step's loss and its gradients' norm."""
        for chunk in self.models:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = TrainStep(self.models, self.sequence, self.groups, 1, len(batches)).run(iter(batches))
        _, norm, _ = self.optimizer.step()
        return loss, float(norm)


@dataclass
class _Measured:
    """A contender's batches, and what its steps gave."""

    what: str
    batches: list[TrainingBatch]
    seconds: list[float]
    loss: LossSum
    norm: float
    peak_bytes: int = 0


def _tree(tree: Rollouts, trainer: _Trainer, options: Options) -> list[dict[str, Any]]:
    rows, prompts = _rows(tree, trainer.vocab_size)
    contenders = {
        "tree": _in_tree(rows, prompts),
        "separate": _apart(rows, prompts, max(options.pack_tokens, max(map(len, rows)))),
    }
    found = _in_turn(contenders, trainer, options)
    whole, apart = found
    peak = peak_tflops(torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    n = dist.get_world_size()
    flops = [training_flops(trainer.config.model, trainer.vocab_size, each.loss.work).causal for each in found]
    seconds = [statistics.median(each.seconds) for each in found]
    ideal, faster = flops[1] / flops[0], seconds[1] / seconds[0]
    errors = abs(whole.loss.mean / apart.loss.mean - 1), abs(whole.norm / apart.norm - 1)
    limits = _LIMITS[torch.bfloat16 if trainer.config.train.precision == "bf16" else torch.float32]
    if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
        raise ValueError(f"loss and gradient norm differ by {errors}: expected at most {limits}, relatively")
    lines = []
    for each, some, s in zip(found, flops, seconds, strict=True):
        line = {"part": "steps", "tree": tree.name, "what": each.what, "mode": options.mode, "ms": s * 1e3}
        line |= {"tflops": some / n / s / 1e12, "tokens": each.loss.work.tokens, "pairs": each.loss.work.pairs}
        line |= {"tokens_per_s": each.loss.work.tokens / s, "rollout_tokens_per_s": sum(map(len, rows)) / s}
        line |= {"responses_per_s": len(rows) / s, "peak_gib": each.peak_bytes / 2**30, "rounds": len(each.seconds)}
        line |= {"micro_batches": len(each.batches), "loss": each.loss.mean, "gradient_norm": each.norm}
        line |= {} if peak is None else {"mfu_pct": 100 * some / n / s / 1e12 / peak}
        lines.append(line)
    lines[0] |= {"faster": faster, "ideal": ideal, "reached": faster / ideal}
    lines[0] |= {"loss_error": errors[0], "gradient_norm_error": errors[1]}
    return lines


def _nothing_shared(trainer: _Trainer, options: Options) -> list[dict[str, Any]]:
    """Compare a pack of rollouts without equal beginnings, merged as trees, with the same pack of documents."""
    generator = torch.Generator().manual_seed(1)
    lengths = [max(2, (1000 + 250 * number) // options.divide) for number in range(18)]
    rows = [torch.randint(1, trainer.vocab_size, (length,), generator=generator) for length in lengths]
    for number, row in enumerate(rows):  # no two begin with the same token
        row[0] = number
    contenders = {"tree": _in_tree(rows, [1] * len(rows)), "separate": _apart(rows, [1] * len(rows), sum(lengths))}
    found = _in_turn(contenders, trainer, options)
    seconds = [statistics.median(each.seconds) for each in found]
    lines: list[dict[str, Any]] = [
        {"part": "steps", "tree": "nothing shared", "what": each.what, "mode": options.mode, "ms": s * 1e3}
        | {"tokens": each.loss.work.tokens, "peak_gib": each.peak_bytes / 2**30, "loss": each.loss.mean}
        for each, s in zip(found, seconds, strict=True)
    ]
    lines[0] |= {"faster": seconds[1] / seconds[0], "ideal": 1.0, "reached": seconds[1] / seconds[0]}
    return lines


def _in_turn(contenders: dict[str, list[TrainingBatch]], trainer: _Trainer, options: Options) -> list[_Measured]:
    """Take one step that is not measured over a micro-batch of each, then rounds of steps in turn."""
    cuda, device, group = torch.cuda.is_available(), local_device(), world_group()
    found = [_Measured(what, batches, [], LossSum(0.0, 1.0, None), 0.0) for what, batches in contenders.items()]  # type: ignore[arg-type]
    for each in found:
        trainer.step(each.batches[:1])
    for number in range(options.rounds):
        if number and options.late(group):
            break
        for each in found if number % 2 == 0 else found[::-1]:
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
                torch.cuda.synchronize(device)
            dist.barrier(group)
            start = time.perf_counter()
            each.loss, each.norm = trainer.step(each.batches)
            if cuda:
                torch.cuda.synchronize(device)
                each.peak_bytes = max(gather_objects(group, torch.cuda.max_memory_allocated(device)))
            each.seconds.append(max(gather_objects(group, time.perf_counter() - start)))
    return found


def _rows(tree: Rollouts, vocab_size: int) -> tuple[list[Tensor], list[int]]:
    """Return the random tokens of every rollout, and the tokens of its root, which have no loss."""
    generator = torch.Generator().manual_seed(0)
    nodes = [torch.randint(1, vocab_size, (length,), generator=generator) for length in tree.lengths]
    for number, node in enumerate(nodes):  # so that branches part at their first token
        node[0] = number
    paths = [tree.path(leaf) for leaf in tree.leaves]
    return [torch.cat([nodes[node] for node in path]) for path in paths], [tree.lengths[path[0]] for path in paths]


def _in_tree(rows: Sequence[Tensor], prompts: Sequence[int]) -> list[TrainingBatch]:
    batch = to_tree([row.tolist() for row in rows], prompt_lengths=prompts, multiple=dist.get_world_size())
    return [TrainingBatch(batch.tokens, batch.labels, batch.loss_mask, batch.documents, batch.parents)]


def _apart(rows: Sequence[Tensor], prompts: Sequence[int], most: int) -> list[TrainingBatch]:
    """Return packs of at most `most` tokens, each filled in the order of the rollouts."""
    packs: list[list[int]] = [[]]
    for number, row in enumerate(rows):
        if packs[-1] and sum(len(rows[other]) for other in packs[-1]) + len(row) > most:
            packs.append([])
        packs[-1].append(number)
    found = []
    for pack in packs:
        some = [rows[number] for number in pack]
        masks = [torch.arange(len(rows[number])) >= prompts[number] - 1 for number in pack]
        for each in masks:
            each[-1] = False
        labels = torch.cat([torch.cat([row[1:], row.new_zeros(1)]) for row in some])
        tokens, mask = torch.cat(some), torch.cat(masks).float()
        found.append(TrainingBatch(tokens[None], labels[None], mask[None], tuple(map(len, some))))
    return found
