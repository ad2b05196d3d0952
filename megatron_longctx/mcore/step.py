"""One training step through Megatron's schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from ..metrics.flops import Work
from ..schedules.mask import Window
from .batch import Batch
from .sequence import ShardedSequence
from .settings import layer_window


@dataclass(frozen=True)
class LossSum:
    """Summed token losses and what their mask sums to, over all ranks and micro-batches, and what these were."""

    loss_sum: float
    num_tokens: float
    work: Work

    @property
    def mean(self) -> float:
        return self.loss_sum / self.num_tokens if self.num_tokens > 0 else 0.0


@dataclass(frozen=True)
class TrainStep:
    """Forward and backward of one step. `models` are this rank's chunks in DDP, `sequence` says which tokens it has."""

    models: Sequence[DistributedDataParallel]
    sequence: ShardedSequence
    groups: ProcessGroupCollection
    micro_batch_size: int
    num_micro_batches: int

    def run(self, batches: Iterator[Batch]) -> LossSum:
        """Gradients end up reduced over ranks and divided by what the loss masks of the whole step sum to.

        Args:
            batches: `num_micro_batches` whole micro-batches; this rank takes its share of each. They may be of any
                lengths; with pipeline parallelism all are taken at once.
        """
        share = self.sequence.whole.num_local_tokens
        if self.groups.pp.size() > 1:
            taken = list(islice(batches, self.num_micro_batches))
            shares = {self.sequence.pack(batch.lengths).num_local_tokens for batch in taken}
            share, batches = max(shares), iter(taken)
            # Stages tell each other the shape of every tensor only where shapes differ. All see the same batches.
            self._config.variable_seq_lengths = len(shares) > 1
        results: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, sequence=self.sequence, windows=self._windows),
            data_iterator=batches,
            model=list(self.models),
            num_microbatches=self.num_micro_batches,
            # Megatron divides this by the context-parallel size to get the shape that pipeline stages exchange. Ranks
            # may hold unequal shares, but all stages of one context-parallel rank hold the same.
            seq_length=share * self.groups.cp.size(),
            micro_batch_size=self.micro_batch_size,
            forward_only=False,
        )
        loss = _reduce(results, self.groups)
        if loss.num_tokens > 0:
            for model in self.models:
                model.scale_gradients(1.0 / loss.num_tokens)
        return loss

    @property
    def _config(self) -> TransformerConfig:
        config: TransformerConfig = get_model_config(self.models[0])
        return config

    @cached_property
    def _windows(self) -> Counter[Window]:
        """How many layers of all stages have them."""
        config = self._config
        return Counter(layer_window(config, number + 1) for number in range(config.num_layers))


def local_device() -> torch.device:
    """The device of this rank's model."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _forward_step(
    batches: Iterator[Batch], model: Any, sequence: ShardedSequence, windows: Counter[Window]
) -> tuple[Tensor, Any]:
    device, batch = local_device(), next(batches)
    pack = sequence.pack(batch.lengths)
    mine = {name: x.to(device, non_blocking=True) for name, x in sequence.shard_batch(batch.tensors, pack).items()}
    losses = model(mine["tokens"], mine["position_ids"], None, labels=mine["labels"], packed_seq_params=pack)
    rows = len(batch.tokens)
    pairs = sum(count * pack.mask(window=window).pairs for window, count in windows.items())
    work = rows * pack.length, rows * pairs, rows * pack.length**2
    return losses, partial(_loss, mine["loss_mask"], work)


def _loss(mask: Tensor, work: tuple[int, ...], losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Megatron's three-part form. It would sum numbers of tokens as integers, and a mask may have fractions: told of no
    tokens it leaves the division to `TrainStep.run`."""
    loss_sum = (losses.float() * mask).sum()
    num_tokens = mask.sum(dtype=torch.float64)
    found = torch.stack((loss_sum.detach().double(), num_tokens))
    return loss_sum, torch.zeros((), dtype=torch.int), {"loss": found, "work": work}


def _reduce(results: list[dict[str, Any]], groups: ProcessGroupCollection) -> LossSum:
    """Sum over the ranks that computed a loss, and tell every rank."""
    total = torch.zeros(5, dtype=torch.float64, device=local_device())
    last_stage = groups.pp.rank() == groups.pp.size() - 1
    if last_stage and groups.tp.rank() == 0:  # tensor-parallel ranks all have the same loss
        total[:2] += sum(result["loss"] for result in results)
        if groups.cp.rank() == 0:  # context-parallel ones all have the same work
            total[2:] += torch.tensor([sum(of) for of in zip(*(r["work"] for r in results), strict=True)]).to(total)
    dist.all_reduce(total)
    loss_sum, num_tokens, *work = total.tolist()
    return LossSum(loss_sum, num_tokens, Work(*map(int, work)))
