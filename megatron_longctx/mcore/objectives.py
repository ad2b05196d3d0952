"""What training minimizes: functions of token losses and of what the batch has beside them.

To add one, write it and add its line in `make_objective`.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ..config import TrainConfig

Objective = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""From cross-entropies of labels and the batch's tensors, named as in `data.Batch` and `[b, s]` of this rank's tokens,
to fp32 `[b, s]`. The step multiplies it by `loss_mask`, sums it, and divides it by the sum of the masks of all
micro-batches and ranks."""


def sft(losses: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the token losses: the cross-entropy of every label."""
    return losses.float()


def policy_gradient(losses: Tensor, batch: Mapping[str, Tensor], clip: tuple[float, float], kl_coeff: float) -> Tensor:
    """Return the clipped loss of PPO and GRPO of every token, plus the KL divergence from a reference.

    The ratio r of probabilities now and in the rollout gives -min(r A, clip(r) A). Without `old_logprobs`, the rollout
    is of the present weights, and r is 1 with the gradient of the log-probability. The divergence is Schulman's
    estimate exp(d) - d - 1 for d = reference - now, as in GRPO.

    Args:
        batch: `advantages`, `old_logprobs` if there are any, `loss_mask`, and `ref_logprobs` if `kl_coeff` is not 0.
        clip: how far r may fall below and rise above 1.
    """
    counts = batch["loss_mask"] != 0  # elsewhere the values are 0, and no probability
    now = -losses.float()
    old = batch.get("old_logprobs", now.detach())
    ratio = torch.where(counts, now - old, 0).exp()
    advantages = batch["advantages"]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages)
    if kl_coeff:
        difference = torch.where(counts, batch["ref_logprobs"] - now, 0)
        loss = loss + kl_coeff * (difference.exp() - difference - 1)
    return loss


def make_objective(train: TrainConfig) -> Objective:
    """Return the objective of `train.objective`."""
    if train.objective == "sft":
        return sft
    return partial(policy_gradient, clip=(train.clip_low, train.clip_high), kl_coeff=train.kl_coeff)
