"""What the steps since a run's last record took, together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from .. import names
from ..config import ModelConfig
from ..mcore.step import LossSum
from ..metrics.flops import Work, performance, training_flops


@dataclass
class Interval:
    """Seconds are by the wall; imbalances_pct: of this rank's micro-batches; losses: of every step."""

    seconds: float = 0.0
    data_wait_s: float = 0.0
    save_stall_s: float = 0.0
    imbalances_pct: list[float] = field(default_factory=list)
    losses: list[LossSum] = field(default_factory=list)

    def record(
        self, model: ModelConfig, vocab_size: int, num_devices: int, peak_tflops: float | None
    ) -> dict[str, Any]:
        """Means over the steps, of the loss over their tokens; the stall is their sum. Arguments as `performance` and
        `training_flops` have."""
        work = sum((loss.work for loss in self.losses), Work(0, 0, 0))
        whole = LossSum(sum(loss.loss_sum for loss in self.losses), sum(loss.num_tokens for loss in self.losses), work)
        flops, steps = training_flops(model, vocab_size, work), len(self.losses)
        return {
            names.LOSS: whole.mean,
            **performance(flops, work.tokens, self.seconds, num_devices, peak_tflops),
            names.STEP_S: self.seconds / steps,
            names.DATA_WAIT_S: self.data_wait_s / steps,
            names.SAVE_STALL_S: self.save_stall_s,
            names.IMBALANCE_PCT: fmean(self.imbalances_pct),
            names.MEASURED_IMBALANCE_PCT: _mean(loss.imbalance_pct for loss in self.losses),
            names.EXPOSED_COMM_S: _mean(loss.waited_s for loss in self.losses),
        }


def _mean(values: Iterable[float | None]) -> float | None:
    """None where one is not known."""
    known = list(values)
    return None if None in known else fmean(value for value in known if value is not None)
