"""Sampling: a token from logits, greedy or drawn by temperature, top-k and top-p; the same on any number of ranks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from ..core.errors import refuse


@dataclass(frozen=True)
class Sampling:
    """How tokens of a sequence are drawn, and when it ends.

    Attributes:
        max_new_tokens: the most tokens to generate.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among this many of the likeliest tokens; None for all.
        top_p: draw among the fewest likeliest tokens whose probabilities add up to this.
        seed: the seed of the draws. A draw depends only on the seed, the sequence's `stream` and the token's number in
            the sequence: neither on other sequences in the batch nor on the ranks.
        stop: tokens that end the sequence; they are not returned.

    Raises:
        ValueError: a value is out of range, or a number of tokens is not an integer.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Only one rank draws. If it failed then, the others would wait for it.
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
    """Return the next token.

    Args:
        logits: `[vocabulary]`.
        stream: the number of the sequence among those that share the seed.
        step: the number of the token in its sequence.

    Raises:
        ValueError: the logits are not finite.
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
    # In the order of token ids, logits that other parallel sizes round otherwise move the bounds of a draw no more than
    # themselves. In the order of logits, two nearly equal ones would change places.
    sums = weights.cumsum(0)
    total = float(sums[-1])
    draw = random.Random(f"{sampling.seed}/{stream}/{step}").random() * total
    return int(torch.searchsorted(sums, min(draw, math.nextafter(total, 0)), right=True))


def _likeliest(weights: Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """Set the weights that top-k or top-p leave out to 0; of equally likely tokens the larger ids go first."""
    order = logits.sort(descending=True, stable=True).indices[: sampling.top_k]
    kept = weights[order]
    before = kept.cumsum(0) - kept
    order = order[before < sampling.top_p * kept.sum()] if sampling.top_p < 1 else order
    return torch.zeros_like(weights).index_copy_(0, order, weights[order])
