"""RoPE: its fields in a `config.json`, which all families share, and its frequencies, plain or scaled.

The frequencies equal `transformers.modeling_rope_utils` on the CPU, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, RopeScaling
from ..core.errors import refuse
from .fields import RESTORE, Fields, refuse_field

_LENGTH = "original_max_position_embeddings"
# Parameters keyed by kind: those that are required, and those that are optional.
_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", _LENGTH, "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor", _LENGTH),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
# The kind, and how pairs are divided among the positions of images, which are equal for text.
_NO_PARAMETERS = ("rope_type", "type", "mrope_section", "mrope_interleaved")
_KEYS = {_LENGTH: "original_length"}  # the other parameters have the names of `RopeScaling`


def read_rope(fields: Fields, default_base: float = 10_000.0, partial: float | None = None) -> dict[str, Any]:
    """Read `rope_theta` and `rope_scaling` or, as later versions of `transformers` write them, `rope_parameters`.

    `partial` is the default of `partial_rotary_factor`; None: the family rotates whole heads. Return keys of
    `ModelConfig`. Refuse a scaling that is not supported, and fields that contradict each other.
    """
    base = fields.get("rope_theta", None, float)
    scaling: dict[str, Any] = {}
    name = "rope_parameters"
    for source in ("rope_parameters", "rope_scaling"):
        if given := fields.get(source, {}):
            if any(scaling[key] != given[key] for key in scaling.keys() & given.keys()):
                expected = f"the values of {source}, {given}"
                raise refuse_field(name, scaling, expected, "Set both to the same values, or delete one.")
            name = source
            scaling |= given
    inner = scaling.pop("rope_theta", None)
    if base is not None and inner is not None and base != inner:
        raise refuse_field("rope_theta", base, f"{inner}, as in rope_parameters", "Set both to the same value.")
    rotated: dict[str, Any] = {}
    if partial is None:
        fields.expect("partial_rotary_factor", 1.0)
    else:
        inner_share = scaling.pop("partial_rotary_factor", None)
        share = fields.get("partial_rotary_factor", partial if inner_share is None else inner_share, float)
        if inner_share not in (None, share):
            expected = f"{inner_share}, as in rope_parameters"
            raise refuse_field("partial_rotary_factor", share, expected, "Set both to the same value.")
        rotated["rotary_percent"] = share
    fields.expect("rope_interleaved", False)
    lengths = fields.get(_LENGTH, None, int), fields.require("max_position_embeddings")
    base = base if inner is None else inner
    return {
        "position_embedding": "rope",
        "rope_base": default_base if base is None else base,
        "rope_scaling": read_scaling(scaling, lengths, name),
        **rotated,
    }


def read_scaling(parameters: Mapping[str, Any], lengths: tuple[int | None, int], name: str) -> RopeScaling:
    """Read `rope_scaling`, or `rope_parameters` without its base, as `transformers` does.

    Refuse a kind that is unknown or depends on a sequence's length (dynamic, longrope), and a parameter that is missing
    or that the kind does not have.

    Args:
        lengths: `original_max_position_embeddings` and `max_position_embeddings` of the config.json.
        name: the field, for messages.
    """
    values = {key: value for key, value in parameters.items() if value is not None and key not in _NO_PARAMETERS}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(kind, str) or kind not in _PARAMETERS:
        expected = "rope_type " + " or ".join(_PARAMETERS)
        raise refuse_field(name, dict(parameters), expected, "Other kinds of scaling are not supported.")
    if values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    required, optional = _PARAMETERS[kind]
    for key, value in values.items():
        if key not in (*required, *optional):
            raise refuse_field(f"{name}.{key}", value, f"no such parameter with rope_type {kind}", RESTORE)
        if isinstance(value, bool) is not (key == "truncate") or not isinstance(value, (int, float)):
            raise refuse_field(f"{name}.{key}", value, "true or false" if key == "truncate" else "a number", RESTORE)
    if _LENGTH in required:
        values[_LENGTH] = lengths[0] or values.get(_LENGTH) or lengths[1]
    for key in required:
        if key not in values:
            raise refuse_field(f"{name}.{key}", None, f"a number with rope_type {kind}", RESTORE)
    mscales = [values.pop(key, None) for key in ("mscale", "mscale_all_dim")]
    if all(mscales) and "attention_factor" not in values:
        numerator, denominator = (yarn_attention_factor(values["factor"], mscale) for mscale in mscales)
        values["attention_factor"] = numerator / denominator
    for key in ("beta_fast", "beta_slow"):
        if values.get(key) == 0:
            del values[key]  # 0 means the default
    return RopeScaling("none" if kind == "default" else kind, **{_KEYS.get(key, key): values[key] for key in values})


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_rope` reads, in the form that all versions of `transformers` read."""
    return {"rope_theta": model.rope_base, "rope_scaling": write_scaling(model.rope_scaling)}


def write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    """Return the parameters that `read_scaling` reads. Raises ValueError: `transformers` has no such kind."""
    if scaling.kind == "none":
        return None
    if scaling.kind not in _PARAMETERS:
        remedy = "It is RoPE with a larger base: give model.rope_base that value, and leave kind at none."
        raise refuse("model.rope_scaling.kind", scaling.kind, "none, linear, llama3 or yarn in a config.json", remedy)
    required, optional = _PARAMETERS[scaling.kind]
    values = {key: getattr(scaling, _KEYS.get(key, key), None) for key in (*required, *optional)}
    return {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}}


@dataclass(frozen=True)
class Frequencies:
    """The frequencies of rotated pairs."""

    inverse: Tensor  # radians per token, fp32 `[d / 2]`
    attention_factor: float = 1.0  # a factor for cosines and sines, and thereby for queries and keys

    def to(self, device: torch.device) -> Frequencies:
        return Frequencies(self.inverse.to(device), self.attention_factor)

    def equals(self, other: Frequencies) -> bool:
        return self.attention_factor == other.attention_factor and torch.equal(self.inverse.cpu(), other.inverse.cpu())


def frequencies(scaling: RopeScaling, base: float, dim: int) -> Frequencies:
    """Return the frequencies of heads with `dim` elements."""
    if scaling.kind == "ntk":
        base = base * scaling.factor ** (dim / (dim - 2))
    periods = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # divided by 2 pi
    plain = 1.0 / periods
    if scaling.kind == "linear":
        return Frequencies(plain / scaling.factor)
    if scaling.kind == "llama3":
        return Frequencies(_llama3(plain, scaling))
    if scaling.kind == "yarn":
        attention_factor = (
            yarn_attention_factor(scaling.factor) if scaling.attention_factor is None else scaling.attention_factor
        )
        return Frequencies(_yarn(periods, scaling, base), attention_factor)
    return Frequencies(plain)


def frequencies_of(model: ModelConfig) -> tuple[Frequencies, Frequencies]:
    """Return the frequencies of layers without and with a window. A window's own base is not scaled."""
    everywhere = frequencies(model.rope_scaling, model.rope_base, model.rope_channels)
    if model.window_rope_base is None:
        return everywhere, everywhere
    return everywhere, frequencies(RopeScaling(), model.window_rope_base, model.rope_channels)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_length
    assert length is not None, "checked with the configuration"
    wavelength = 2 * math.pi / plain
    slow, fast = wavelength > length / low, wavelength < length / high
    unscaled = (length / wavelength - low) / (high - low)  # the weight of the plain frequency in the ramp
    ramp = (1 - unscaled) * plain / scaling.factor + unscaled * plain
    return torch.where(slow, plain / scaling.factor, torch.where(fast, plain, ramp))


def _yarn(periods: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    dim, length = 2 * len(periods), scaling.original_length
    assert length is not None, "checked with the configuration"
    # The indices, not rounded, of the pairs that rotate beta_fast and beta_slow times in `length` tokens.
    first, last = (
        dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    unscaled = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - unscaled) + 1.0 / periods * unscaled


def yarn_attention_factor(factor: float, mscale: float = 1) -> float:
    """Return YaRN's factor for cosines and sines with contexts of `factor` times the original length."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
