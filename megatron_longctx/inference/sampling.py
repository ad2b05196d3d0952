"""From logits to tokens: greedy, or drawn after temperature, top-k and top-p; the same on any number of ranks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from ..errors import refuse


@dataclass(frozen=True)
class Sampling:
    """How a sequence goes on, and when it ends.

    Attributes:
        max_new_tokens: most tokens to generate.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among so many of the likeliest tokens; None for all.
        top_p: draw among the fewest likeliest tokens whose probabilities add up to this.
        seed: of the draws. A draw depends on the seed, the sequence's `stream` and the token's number in it only: not
            on what else is in the batch, nor on the ranks.
        stop: tokens that end the sequence; they are not part of what is given out.

    Raises:
        ValueError: a value out of range, or a number of tokens that is no integer.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # One rank alone draws, and the others would wait for it were it to fail at that.
        for name in ("max_new_tokens", "top_k"):
            value = getattr(self, name)
            if not (isinstance(value, Integral) or (value is None and name == "top_k")):
                raise refuse(name, repr(value), "an integer", "Round it.")
        if self.max_new_tokens < 1:
            raise refuse("max_new_tokens", self.max_new_tokens, "1 or more", "Raise it.")
        if not 0 <= self.temperature < math.inf:
            raise refuse("temperature", self.temperature, "0 (greedy) or a positive number", "1 samples as trained.")
        if self.top_k is not None and self.top_k < 1:
            raise refuse("top_k", self.top_k, "1 or more, or null", "Leave it null to draw among all tokens.")
        if not 0 < self.top_p <= 1:
            raise refuse("top_p", self.top_p, "above 0 and at most 1", "1 draws among all tokens.")


def sample(logits: Tensor, sampling: Sampling, stream: int, step: int) -> int:
    """The next token.

    Args:
        logits: `[vocabulary]`.
        stream: number of the sequence among those that share the seed.
        step: number of the token in its sequence.

    Raises:
        ValueError: logits that are not finite.
    """
    if not torch.isfinite(logits).all():
        raise ValueError("logits are not finite: expected numbers. Check the checkpoint, or use train.precision=fp32.")
    if sampling.temperature == 0:
        return int(logits.argmax())
    # On the CPU in fp64: a draw is then the same on every device.
    logits = logits.detach().cpu().double()
    weights = torch.exp((logits - logits.max()) / sampling.temperature)  # of numbers up to 0, at any temperature
    if sampling.top_k is not None or sampling.top_p < 1:
        weights = _likeliest(weights, logits, sampling)
    # In the order of token ids: logits that other parallel sizes round otherwise move the draw's bounds as little as
    # themselves. In the order of the logits two that are nearly equal would change places.
    sums = weights.cumsum(0)
    total = float(sums[-1])
    draw = random.Random(f"{sampling.seed}/{stream}/{step}").random() * total
    return int(torch.searchsorted(sums, min(draw, math.nextafter(total, 0)), right=True))


def _likeliest(weights: Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """`weights`, 0 for tokens that top-k or top-p leave out; of equally likely ones those with larger ids first."""
    order = logits.sort(descending=True, stable=True).indices[: sampling.top_k]
    kept = weights[order]
    before = kept.cumsum(0) - kept
    order = order[before < sampling.top_p * kept.sum()] if sampling.top_p < 1 else order
    return torch.zeros_like(weights).index_copy_(0, order, weights[order])
