"""Steps through Megatron's schedules: forward and backward of training, and forward alone for losses of other text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, pairwise
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from ..comm import Times
from ..metrics.flops import Work
from ..schedules.mask import Window
from .core_attention import layer_window
from .data import Batch
from .pack import Pack
from .sequence import ShardedSequence


@dataclass(frozen=True)
class LossSum:
    """Summed token losses and what their mask sums to, over all ranks and micro-batches, and what these were.

    waited_s: seconds that this rank's attention has waited for messages; None: not measured. computed_s: those that
    every data- and context-parallel rank has computed attention, `[dp, cp]`; zeros: not measured.
    """

    loss_sum: float
    num_tokens: float
    work: Work
    waited_s: float | None = None
    computed_s: Sequence[Sequence[float]] = ()

    @property
    def mean(self) -> float:
        return self.loss_sum / self.num_tokens if self.num_tokens > 0 else 0.0

    @property
    def imbalance_pct(self) -> float | None:
        """By how much the slowest context-parallel rank computed attention for longer than the average of its group,
        in the group where that is most; None: not measured."""
        found = [100 * (max(seconds) / fmean(seconds) - 1) for seconds in self.computed_s if any(seconds)]
        return max(found, default=None)


@dataclass(frozen=True)
class _Step:
    """`models` are this rank's chunks, `sequence` says which tokens it has."""

    models: Sequence[Any]
    sequence: ShardedSequence
    groups: ProcessGroupCollection
    micro_batch_size: int

    def _scheduled(
        self, forward: Callable[..., Any], batches: Iterator[Batch], count: int, forward_only: bool
    ) -> list[dict[str, Any]]:
        """What the losses of `count` micro-batches gave, on the last pipeline stage."""
        share = self.sequence.whole.num_local_tokens
        if self.groups.pp.size() > 1:
            taken = list(islice(batches, count))
            shares = {self.sequence.pack(batch.lengths).num_local_tokens for batch in taken}
            share, batches = max(shares), iter(taken)
            # Stages tell each other the shape of every tensor only where shapes differ. All see the same batches.
            self._config.variable_seq_lengths = len(shares) > 1
        results: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches,
            model=list(self.models),
            num_microbatches=count,
            # Megatron divides this by the context-parallel size to get the shape that pipeline stages exchange. Ranks
            # may hold unequal shares, but all stages of one context-parallel rank hold the same.
            seq_length=share * self.groups.cp.size(),
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
        )
        return results

    @property
    def _config(self) -> TransformerConfig:
        config: TransformerConfig = get_model_config(self.models[0])
        return config


@dataclass(frozen=True)
class TrainStep(_Step):
    """Forward and backward of one step, of chunks in DDP."""

    num_micro_batches: int

    def run(self, batches: Iterator[Batch]) -> LossSum:
        """Gradients end up reduced over ranks and divided by what the loss masks of the whole step sum to.

        Args:
            batches: `num_micro_batches` whole micro-batches; this rank takes its share of each. They may be of any
                lengths; with pipeline parallelism all are taken at once.
        """
        forward = partial(_forward_step, sequence=self.sequence, windows=self._windows)
        results = self._scheduled(forward, batches, self.num_micro_batches, forward_only=False)
        loss = _reduce(results, self.groups, self.sequence.attention.times())
        if loss.num_tokens > 0:
            for model in self.models:
                model.scale_gradients(1.0 / loss.num_tokens)
        return loss

    @cached_property
    def _windows(self) -> Counter[Window]:
        """How many layers of all stages have them."""
        config = self._config
        return Counter(layer_window(config, number + 1) for number in range(config.num_layers))


@dataclass(frozen=True)
class EvalStep(_Step):
    """Token losses of a model, in DDP or not, which is left as it was."""

    def run(self, read: Callable[[int], Batch], numbers: Sequence[int], total: int, edges: Sequence[int]) -> Tensor:
        """Sums of token losses and of their masks, by micro-batch and range of positions. Collective over the world.

        A row is the same, to the bit, for every number of data-parallel ranks and pipeline stages.

        Args:
            read: gives a whole micro-batch by its number.
            numbers: of this data-parallel rank's micro-batches, out of `total`.
            edges: the first position of every range, and the one after the last.

        Returns:
            fp64 `[total, ranges, 2]`, on every rank.
        """
        table = torch.zeros(total, len(edges) - 1, 2, dtype=torch.float64, device=local_device())
        forward = partial(_forward_alone, sequence=self.sequence, edges=edges)
        with _evaluating(self.models), torch.no_grad():
            if numbers:
                results = self._scheduled(forward, map(read, numbers), len(numbers), forward_only=True)
                if self.groups.tp.rank() == 0:  # tensor-parallel ranks all have the same losses
                    for number, result in zip(numbers, results, strict=False):  # none before the last stage
                        table[number] = result["loss"]
        dist.all_reduce(table)
        return table.cpu()


@contextmanager
def _evaluating(models: Sequence[Any]) -> Iterator[None]:
    """In evaluation mode, with parameters whole: those that a next step of training would gather as it goes."""
    overlapped = [model for model in models if getattr(model, "use_forward_hook", False)]
    training = [model.training for model in models]
    for model in overlapped:
        model.disable_forward_pre_hook()
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, training, strict=True):
            model.train(mode)
        for model in overlapped:
            model.enable_forward_pre_hook()


def local_device() -> torch.device:
    """The device of this rank's model."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _forward_step(
    batches: Iterator[Batch], model: Any, sequence: ShardedSequence, windows: Counter[Window]
) -> tuple[Tensor, Any]:
    batch = next(batches)
    losses, mine, pack = _token_losses(batch, model, sequence)
    rows = len(batch.tokens)
    pairs = sum(count * pack.mask(window=window).pairs for window, count in windows.items())
    work = rows * pack.length, rows * pairs, rows * pack.length**2
    return losses, partial(_loss, mine["loss_mask"], work)


def _forward_alone(
    batches: Iterator[Batch], model: Any, sequence: ShardedSequence, edges: Sequence[int]
) -> tuple[Tensor, Any]:
    losses, mine, _ = _token_losses(next(batches), model, sequence)
    return losses, partial(_loss_by_position, mine, edges)


def _token_losses(batch: Batch, model: Any, sequence: ShardedSequence) -> tuple[Tensor, dict[str, Tensor], Pack]:
    """`[b, s]` of this rank's tokens on the last stage, with what it has of the batch."""
    device, pack = local_device(), sequence.pack(batch.lengths)
    mine = {name: x.to(device, non_blocking=True) for name, x in sequence.shard_batch(batch.tensors, pack).items()}
    return (
        model(mine["tokens"], mine["position_ids"], None, labels=mine["labels"], packed_seq_params=pack),
        mine,
        pack,
    )


def _loss_by_position(
    batch: Mapping[str, Tensor], edges: Sequence[int], losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Megatron's three-part form; sums by range one after the other, in the same order always."""
    mask, positions = batch["loss_mask"].double(), batch["position_ids"]
    values = torch.stack((losses.double() * mask, mask))
    found = [(values * ((first <= positions) & (positions < stop))).sum((1, 2)) for first, stop in pairwise(edges)]
    return losses.sum(), torch.zeros((), dtype=torch.int), {"loss": torch.stack(found)}


def _loss(mask: Tensor, work: tuple[int, ...], losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Megatron's three-part form. It would sum numbers of tokens as integers, and a mask may have fractions: told of no
    tokens it leaves the division to `TrainStep.run`."""
    loss_sum = (losses.float() * mask).sum()
    num_tokens = mask.sum(dtype=torch.float64)
    found = torch.stack((loss_sum.detach().double(), num_tokens))
    return loss_sum, torch.zeros((), dtype=torch.int), {"loss": found, "work": work}


def _reduce(results: list[dict[str, Any]], groups: ProcessGroupCollection, times: Times | None) -> LossSum:
    """Sum over the ranks that computed a loss, and tell every rank."""
    dp, cp = groups.dp.size(), groups.cp.size()
    total = torch.zeros(5 + dp * cp, dtype=torch.float64, device=local_device())
    total[5 + groups.dp.rank() * cp + groups.cp.rank()] = 0.0 if times is None else times.computed_s
    last_stage = groups.pp.rank() == groups.pp.size() - 1
    if last_stage and groups.tp.rank() == 0:  # tensor-parallel ranks all have the same loss
        total[:2] += sum(result["loss"] for result in results)
        if groups.cp.rank() == 0:  # context-parallel ones all have the same work
            total[2:5] += torch.tensor([sum(of) for of in zip(*(r["work"] for r in results), strict=True)]).to(total)
    dist.all_reduce(total)
    loss_sum, num_tokens, *work = total[:5].tolist()
    waited_s = None if times is None else times.waited_s
    return LossSum(loss_sum, num_tokens, Work(*map(int, work)), waited_s, total[5:].view(dp, cp).tolist())
