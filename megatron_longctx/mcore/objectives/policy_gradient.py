"""The clipped policy gradient of PPO and GRPO, with given advantages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def policy_gradient(losses: Tensor, batch: Mapping[str, Tensor], clip: tuple[float, float], kl_coeff: float) -> Tensor:
    """Return PPO's clipped loss of every token, plus the KL divergence from a reference.

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
