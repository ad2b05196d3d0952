"""RoPE: what a `config.json` says of it, as all families have it, and its frequencies, plain or scaled.

These are, bit for bit, those of `transformers.modeling_rope_utils` on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, RopeScaling
from ..errors import refuse
from .fields import Fields, refused

_DEFAULT_BASE = 10_000.0
_LENGTH = "original_max_position_embeddings"
# By kind, the parameters without which there is none, and those that may be left out.
_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", _LENGTH, "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor", _LENGTH),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_OURS = {_LENGTH: "original_length"}
_REMEDY = "Take the config.json that was published with the model."


def read_rope(given: Fields, default_base: float = _DEFAULT_BASE) -> dict[str, Any]:
    """Keys of `ModelConfig` for RoPE, of `rope_theta` and `rope_scaling` or, as later versions of `transformers` write
    them, of `rope_parameters`.

    Raises:
        ValueError: a scaling that is not served, or two that differ.
    """
    base = given.take("rope_theta", None, float)
    scaling: dict[str, Any] = {}
    name = "rope_parameters"
    for source in ("rope_parameters", "rope_scaling"):
        if said := given.take(source, {}):
            if any(scaling[key] != said[key] for key in scaling.keys() & said.keys()):
                raise refused(name, scaling, f"what {source} says, {said}", "Set both alike, or delete one.")
            name = source
            scaling |= said
    inner = scaling.pop("rope_theta", None)
    if base is not None and inner is not None and base != inner:
        raise refused("rope_theta", base, f"{inner}, as in rope_parameters", "Set both alike.")
    given.only("partial_rotary_factor", 1.0)
    given.only("rope_interleaved", False)
    found = base if inner is None else inner
    lengths = given.take(_LENGTH, None, int), given.need("max_position_embeddings")
    return {
        "position_embedding": "rope",
        "rope_base": default_base if found is None else found,
        "rope_scaling": read_scaling(scaling, lengths, name),
    }


def read_scaling(said: Mapping[str, Any], lengths: tuple[int | None, int], name: str) -> RopeScaling:
    """What `rope_scaling` says, or without its base `rope_parameters`, as `transformers` understands it.

    Args:
        lengths: of a config.json, `original_max_position_embeddings` and `max_position_embeddings`.
        name: the field, for messages.

    Raises:
        ValueError: a kind that is not known or goes by a sequence's length (dynamic, longrope), a parameter that is
            missing or that the kind does not have.
    """
    values = {key: value for key, value in said.items() if value is not None and key not in ("rope_type", "type")}
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind not in _PARAMETERS:
        expected = "rope_type " + " or ".join(_PARAMETERS)
        raise refused(name, dict(said), expected, "Scaling of other kinds is not served.")
    if values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    needed, optional = _PARAMETERS[kind]
    for key, value in values.items():
        if key not in (*needed, *optional):
            raise refused(f"{name}.{key}", value, f"no such parameter with rope_type {kind}", _REMEDY)
        if isinstance(value, bool) is not (key == "truncate") or not isinstance(value, (int, float)):
            raise refused(f"{name}.{key}", value, "true or false" if key == "truncate" else "a number", _REMEDY)
    if _LENGTH in needed:
        values[_LENGTH] = lengths[0] or values.get(_LENGTH) or lengths[1]
    for key in needed:
        if key not in values:
            raise refused(f"{name}.{key}", None, f"a number with rope_type {kind}", _REMEDY)
    mscales = [values.pop(key, None) for key in ("mscale", "mscale_all_dim")]
    if all(mscales) and "attention_factor" not in values:
        of_one, of_all = (yarn_stretch(values["factor"], mscale) for mscale in mscales)
        values["attention_factor"] = of_one / of_all
    for key in ("beta_fast", "beta_slow"):
        if values.get(key) == 0:
            del values[key]  # the default
    return RopeScaling("none" if kind == "default" else kind, **{_OURS.get(key, key): values[key] for key in values})


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The fields that `read_rope` takes, in the form that all versions of `transformers` read."""
    return {"rope_theta": model.rope_base, "rope_scaling": write_scaling(model.rope_scaling)}


def write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    """What `read_scaling` takes.

    Raises:
        ValueError: a kind that has no name there.
    """
    if scaling.kind == "none":
        return None
    if scaling.kind not in _PARAMETERS:
        remedy = "It is RoPE with a larger base: give model.rope_base that value, and leave kind at none."
        raise refuse("model.rope_scaling.kind", scaling.kind, "none, linear, llama3 or yarn in a config.json", remedy)
    needed, optional = _PARAMETERS[scaling.kind]
    values = {key: getattr(scaling, _OURS.get(key, key), None) for key in (*needed, *optional)}
    return {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}}


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
