"""One training step through Megatron's schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from .sequence import ShardedSequence


@dataclass(frozen=True)
class LossSum:
    """Summed token losses and what their mask sums to, over all ranks and micro-batches."""

    loss_sum: float
    num_tokens: float

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

    def run(self, batches: Iterator[dict[str, Tensor]]) -> LossSum:
        """Gradients end up reduced over ranks and divided by what the loss masks of the whole step sum to.

        Args:
            batches: `num_micro_batches` whole micro-batches of `[b, S]` tensors; this rank takes its share of each.
        """
        results: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, sequence=self.sequence),
            data_iterator=batches,
            model=list(self.models),
            num_microbatches=self.num_micro_batches,
            # Megatron divides this by the context-parallel size to get the shape that pipeline stages exchange. Ranks
            # may hold unequal shares, but all stages of one context-parallel rank hold the same.
            seq_length=self.sequence.num_local_tokens * self.groups.cp.size(),
            micro_batch_size=self.micro_batch_size,
            forward_only=False,
        )
        loss = _reduce(results, self.groups)
        if loss.num_tokens > 0:
            for model in self.models:
                model.scale_gradients(1.0 / loss.num_tokens)
        return loss


def local_device() -> torch.device:
    """The device of this rank's model."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _forward_step(batches: Iterator[dict[str, Tensor]], model: Any, sequence: ShardedSequence) -> tuple[Tensor, Any]:
    device = local_device()
    batch = {name: x.to(device, non_blocking=True) for name, x in sequence.shard_batch(next(batches)).items()}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(_loss, batch["loss_mask"])


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's three-part form. It would sum numbers of tokens as integers, and a mask may have fractions: told of no
    tokens it leaves the division to `TrainStep.run`."""
    loss_sum = (losses.float() * mask).sum()
    num_tokens = mask.sum(dtype=torch.float64)
    found = torch.stack((loss_sum.detach().double(), num_tokens))
    return loss_sum, torch.zeros((), dtype=torch.int), {"loss": found}


def _reduce(results: list[dict[str, Tensor]], groups: ProcessGroupCollection) -> LossSum:
    """Sum over the ranks that computed a loss, and tell every rank."""
    total = torch.zeros(2, dtype=torch.float64, device=local_device())
    last_stage = groups.pp.rank() == groups.pp.size() - 1
    if last_stage and groups.tp.rank() == 0:  # tensor-parallel ranks all have the same loss
        total += sum(result["loss"] for result in results)
    dist.all_reduce(total)
    loss_sum, num_tokens = total.tolist()
    return LossSum(loss_sum, num_tokens)
