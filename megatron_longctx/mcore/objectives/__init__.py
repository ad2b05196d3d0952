"""What training minimizes, one file each: a function of token losses and of what the batch has beside them.

To add one, add its file and its line in `make_objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from ...config import TrainConfig
from .policy_gradient import policy_gradient
from .sft import sft

Objective = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""From cross-entropies of labels and the batch's tensors, named as in `data.Batch` and `[b, s]` of this rank's tokens,
to fp32 `[b, s]`. The step multiplies it by `loss_mask`, sums it, and divides it by the sum of the masks of all
micro-batches and ranks."""


def make_objective(train: TrainConfig) -> Objective:
    """Return the objective of `train.objective`."""
    if train.objective == "sft":
        return sft
    return partial(policy_gradient, clip=(train.clip_low, train.clip_high), kl_coeff=train.kl_coeff)
