"""The frequencies of RoPE, plain or scaled: bit for bit those of `transformers.modeling_rope_utils` on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig, RopeScaling


@dataclass(frozen=True)
class Frequencies:
    """How fast pairs of elements turn.

    inverse: fp32 `[d / 2]`, radians a token. stretch: what cosines and sines, and so queries and keys, are multiplied
    by.
    """

    inverse: Tensor
    stretch: float = 1.0

    def to(self, device: torch.device) -> Frequencies:
        return Frequencies(self.inverse.to(device), self.stretch)

    def equals(self, other: Frequencies) -> bool:
        return self.stretch == other.stretch and torch.equal(self.inverse.cpu(), other.inverse.cpu())


def frequencies(scaling: RopeScaling, base: float, dim: int) -> Frequencies:
    """Of heads of `dim` elements."""
    if scaling.kind == "ntk":
        base = base * scaling.factor ** (dim / (dim - 2))
    periods = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # over 2 pi
    plain = 1.0 / periods
    if scaling.kind == "linear":
        return Frequencies(plain / scaling.factor)
    if scaling.kind == "llama3":
        return Frequencies(_llama3(plain, scaling))
    if scaling.kind == "yarn":
        stretch = yarn_stretch(scaling.factor) if scaling.attention_factor is None else scaling.attention_factor
        return Frequencies(_yarn(periods, scaling, base), stretch)
    return Frequencies(plain)


def frequencies_of(model: ModelConfig) -> tuple[Frequencies, Frequencies]:
    """Of the layers that see everything, and of those with a window, whose own base is not scaled."""
    everywhere = frequencies(model.rope_scaling, model.rope_base, model.rope_channels)
    if model.window_rope_base is None:
        return everywhere, everywhere
    return everywhere, frequencies(RopeScaling(), model.window_rope_base, model.rope_channels)


def _original_length(scaling: RopeScaling) -> int:
    assert scaling.original_length is not None, "checked with the configuration"
    return scaling.original_length


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, _original_length(scaling)
    wavelength = 2 * math.pi / plain
    slow, fast = wavelength > length / low, wavelength < length / high
    part = (length / wavelength - low) / (high - low)  # of what stays
    between = (1 - part) * plain / scaling.factor + part * plain
    return torch.where(slow, plain / scaling.factor, torch.where(fast, plain, between))


def _yarn(periods: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    dim, length = 2 * len(periods), _original_length(scaling)

    def pair_that_turns(times: float) -> float:
        """In `length` tokens."""
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    stays = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - stays) + 1.0 / periods * stays


def yarn_stretch(factor: float, mscale: float = 1) -> float:
    """What cosines and sines are multiplied by for contexts of `factor` times the length."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
