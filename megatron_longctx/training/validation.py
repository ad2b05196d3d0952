"""The loss of text that a run is not trained on, while it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..mcore.data import TrainingData
from ..mcore.step import EvalStep, TrainStep


@dataclass(frozen=True)
class Validation:
    """The first samples of the second part of `data.split`, the same ones every time.

    Attributes:
        interval: of `loss`, in steps.
        total: micro-batches, of all data-parallel ranks.
    """

    interval: int
    total: int
    step: EvalStep
    data: TrainingData
    length: int

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int, step: TrainStep) -> Validation | None:
        """What `train.eval_interval` asks for; None where it is null. step: that trains the model."""
        train = config.train
        if train.eval_interval is None:
            return None
        data = TrainingData(config, tokenizer, vocab_size, part=1)
        forward = EvalStep(step.models, step.sequence, step.groups, step.micro_batch_size)
        total = train.eval_samples // step.micro_batch_size
        return cls(train.eval_interval, total, forward, data, config.data.seq_length)

    def loss(self) -> float:
        """Mean over tokens, the same on every rank and, to the bit, for every data-parallel and pipeline size."""
        group, rows = self.step.groups.dp, self.step.micro_batch_size
        numbers = range(group.rank(), self.total, group.size())
        table = self.step.run(
            lambda number: self.data[range(number * rows, (number + 1) * rows)], numbers, self.total, (0, self.length)
        )
        loss_sum, num_tokens = table.sum((0, 1)).tolist()
        return loss_sum / num_tokens if num_tokens > 0 else 0.0
