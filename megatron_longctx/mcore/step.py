"""Steps with Megatron's pipeline schedules: forward and backward for training, forward alone for evaluation."""

import logging
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

from ..core.comm import AttentionTimes
from ..core.plans.mask import Window
from ..planner.flops import Work
from .core_attention import layer_window
from .data import TrainingBatch
from .fp8 import gather_parameters
from .objectives import Objective, sft
from .pack import Pack
from .sequence import ShardedSequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LossSum:
    """The sums of token losses and of their mask over all ranks and micro-batches, and the work of the step.

    waited_s: the seconds that this rank's attention waited for messages; None: not measured.
    computed_s: the seconds that every data- and context-parallel rank computed attention, `[dp, cp]`; zeros: not
        measured.
    replicas: the work of every data-parallel replica.
    """

    loss_sum: float
    num_tokens: float
    work: Work
    waited_s: float | None = None
    computed_s: Sequence[Sequence[float]] = ()
    replicas: Sequence[Work] = ()

    @property
    def mean(self) -> float:
        return self.loss_sum / self.num_tokens if self.num_tokens > 0 else 0.0

    @property
    def imbalance_pct(self) -> float | None:
        """How much longer the slowest context-parallel rank computed attention than the average of its group, in the
        most uneven group; None: not measured."""
        return max((100 * (max(each) / fmean(each) - 1) for each in self.computed_s if any(each)), default=None)


@dataclass(frozen=True)
class _Step:
    models: Sequence[Any]
    sequence: ShardedSequence
    groups: ProcessGroupCollection
    micro_batch_size: int

    def _run_schedule(
        self, forward: Callable[..., Any], batches: Iterator[TrainingBatch], count: int, forward_only: bool
    ) -> list[dict[str, Any]]:
        """Return what the loss functions of `count` micro-batches returned, on the last pipeline stage."""
        num_tokens = self.sequence.whole.num_local_tokens
        if self.groups.pp.size() > 1:
            taken = list(islice(batches, count))
            counts = {self.sequence.pack(batch.lengths, batch.parents).num_local_tokens for batch in taken}
            num_tokens, batches = max(counts), iter(taken)
            # Stages exchange the shape of every tensor only if shapes differ. All stages have the same batches.
            self._config.variable_seq_lengths = len(counts) > 1
        results: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches,
            model=list(self.models),
            num_microbatches=count,
            # Megatron divides this by the context-parallel size to get the shape that pipeline stages exchange.
            # Context-parallel ranks may hold unequal numbers of tokens, but all stages of one rank hold the same.
            seq_length=num_tokens * self.groups.cp.size(),
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
    """Forward and backward of one step, with model chunks in DDP."""

    num_micro_batches: int
    objective: Objective = sft

    def run(self, batches: Iterator[TrainingBatch]) -> LossSum:
        """Compute gradients, reduced over ranks and divided by the sum of the loss masks of the whole step.

        batches: `num_micro_batches` whole micro-batches of any lengths; this rank computes its tokens of each. With
            pipeline parallelism, all are read before the first is computed.
        """
        forward = partial(_forward_step, sequence=self.sequence, windows=self._windows, objective=self.objective)
        results = self._run_schedule(forward, batches, self.num_micro_batches, forward_only=False)
        loss = _reduce(results, self.groups, self.sequence.attention.times())
        if loss.num_tokens > 0:
            for model in self.models:
                model.scale_gradients(1.0 / loss.num_tokens)
        elif dist.get_rank() == 0:
            logger.warning(
                "no token of this step counts in the loss, which is therefore 0: its documents have one token each, or "
                "their masks leave all out"
            )
        return loss

    @cached_property
    def _windows(self) -> Counter[Window]:
        """The number of layers with attention, over all stages, with each window."""
        config = self._config
        step = 2 if config.is_hybrid_model else 1  # every second layer of a stack is an MLP
        recurrent = config.linear_attention_freq or [0] * config.num_layers
        numbers = [number for number in range(0, config.num_layers, step) if not recurrent[number]]
        return Counter(layer_window(config, number + 1) for number in numbers)


@dataclass(frozen=True)
class EvalStep(_Step):
    """Token losses of a model, in DDP or not, which is not changed."""

    def run(
        self, read: Callable[[int], TrainingBatch], numbers: Sequence[int], total: int, edges: Sequence[int]
    ) -> Tensor:
        """Return the sums of token losses and of their masks in each range of positions, fp64 `[total, ranges, 2]`, on
        every rank. Collective over the world.

        A micro-batch's row is bit-identical for every number of data-parallel ranks and pipeline stages.

        Args:
            read: returns a whole micro-batch by its number.
            numbers: this data-parallel rank's micro-batches, out of `total`.
            edges: the first position of every range, and the position after the last range.
        """
        table = torch.zeros(total, len(edges) - 1, 2, dtype=torch.float64, device=local_device())
        forward = partial(_forward_alone, sequence=self.sequence, edges=edges)
        with _evaluating(self.models), torch.no_grad():
            if numbers:
                results = self._run_schedule(forward, map(read, numbers), len(numbers), forward_only=True)
                if self.groups.tp.rank() == 0:  # all tensor-parallel ranks have the same losses
                    for number, result in zip(numbers, results, strict=False):  # no results before the last stage
                        table[number] = result["loss"]
        dist.all_reduce(table)
        return table.cpu()


@contextmanager
def _evaluating(models: Sequence[Any]) -> Iterator[None]:
    """Switch models to evaluation mode, and complete gathers of parameters that overlap the next training step.

    Products in FP8 are computed in the model's precision, as by the exported model. They would also change amaxes.
    Weights that are in FP8 alone keep their rounding.
    """
    overlapped = [model for model in models if getattr(model, "use_forward_hook", False)]
    training = [(model.training, model.config.fp8) for model in models]
    for model in overlapped:
        model.disable_forward_pre_hook(param_sync=False)
        gather_parameters(model)
    for model in models:
        model.eval()
        model.config.fp8 = None
    try:
        yield
    finally:
        for model, (mode, fp8) in zip(models, training, strict=True):
            model.train(mode)
            model.config.fp8 = fp8
        for model in overlapped:
            model.enable_forward_pre_hook()


def local_device() -> torch.device:
    """Return the device of this rank's model."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _forward_step(
    batches: Iterator[TrainingBatch],
    model: Any,
    sequence: ShardedSequence,
    windows: Counter[Window],
    objective: Objective,
) -> tuple[Tensor, Any]:
    batch = next(batches)
    losses, local, pack = token_losses(batch, model, sequence)
    rows = len(batch.tokens)
    pairs = sum(count * pack.mask(window=window).pairs for window, count in windows.items())
    work = rows * pack.length, rows * pairs, rows * pack.length**2
    return losses, partial(_loss, local, work, objective)


def _forward_alone(
    batches: Iterator[TrainingBatch], model: Any, sequence: ShardedSequence, edges: Sequence[int]
) -> tuple[Tensor, Any]:
    losses, local, pack = token_losses(next(batches), model, sequence)
    return losses, partial(_loss_by_position, local["loss_mask"], pack.positions(losses.device), edges)


def token_losses(batch: TrainingBatch, model: Any, sequence: ShardedSequence) -> tuple[Tensor, dict[str, Tensor], Pack]:
    """Return the losses of this rank's tokens `[b, s]` (on the last stage), its part of the batch, and the pack."""
    device, pack = local_device(), sequence.pack(batch.lengths, batch.parents)
    local = {name: x.to(device, non_blocking=True) for name, x in sequence.shard_batch(batch.tensors, pack).items()}
    positions = pack.positions(device).expand(len(local["tokens"]), -1)
    losses = model(local["tokens"], positions, None, labels=local["labels"], packed_seq_params=pack)
    return losses, local, pack


def _loss_by_position(
    mask: Tensor, positions: Tensor, edges: Sequence[int], losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return a loss in Megatron's three-part form. Ranges are summed one by one, so the result is deterministic."""
    values = torch.stack((losses.double() * mask, mask.double()))
    sums = [(values * ((first <= positions) & (positions < stop))).sum((1, 2)) for first, stop in pairwise(edges)]
    return losses.sum(), torch.zeros((), dtype=torch.int), {"loss": torch.stack(sums)}


def _loss(
    batch: Mapping[str, Tensor], work: tuple[int, ...], objective: Objective, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return a loss in Megatron's three-part form.

    Megatron sums numbers of tokens as integers, but a mask may have fractions. With zero tokens it leaves the division
    to `TrainStep.run`.
    """
    mask = batch["loss_mask"]
    loss_sum = (objective(losses, batch) * mask).sum()
    sums = torch.stack((loss_sum.detach().double(), mask.sum(dtype=torch.float64)))
    return loss_sum, torch.zeros((), dtype=torch.int), {"loss": sums, "work": work}


def _reduce(results: list[dict[str, Any]], groups: ProcessGroupCollection, times: AttentionTimes | None) -> LossSum:
    """Return, on every rank, the sums over the ranks that computed a loss."""
    dp, cp = groups.dp.size(), groups.cp.size()
    total = torch.zeros(2 + dp * (3 + cp), dtype=torch.float64, device=local_device())
    works, seconds = total[2 : 2 + dp * 3].view(dp, 3), total[2 + dp * 3 :].view(dp, cp)
    seconds[groups.dp.rank(), groups.cp.rank()] = 0.0 if times is None else times.computed_s
    last_stage = groups.pp.rank() == groups.pp.size() - 1
    if last_stage and groups.tp.rank() == 0:  # all tensor-parallel ranks have the same loss
        total[:2] += sum(result["loss"] for result in results)
        if groups.cp.rank() == 0:  # all context-parallel ranks report the same work
            work = [sum(of) for of in zip(*(result["work"] for result in results), strict=True)]
            works[groups.dp.rank()] = torch.tensor(work).to(total)
    dist.all_reduce(total)
    loss_sum, num_tokens = total[:2].tolist()
    replicas = [Work(*map(int, each)) for each in works.tolist()]
    waited_s = None if times is None else times.waited_s
    return LossSum(loss_sum, num_tokens, sum(replicas, Work(0, 0, 0)), waited_s, seconds.tolist(), replicas)
