"""Rotary positions in a `config.json`, as all families have them."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from .fields import Fields, refused

_DEFAULT_BASE = 10_000.0


def read_rope(given: Fields, default_base: float = _DEFAULT_BASE) -> dict[str, Any]:
    """Keys of `ModelConfig` for RoPE, of `rope_theta` and `rope_scaling` or, as later versions of `transformers` write
    them, of `rope_parameters`.

    Raises:
        ValueError: a scaling that is not served.
    """
    base = given.take("rope_theta", None, float)
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        scaling |= given.take(name, {})
    inner = scaling.pop("rope_theta", None)
    if base is not None and inner is not None and base != inner:
        raise refused("rope_theta", base, f"{inner}, as in rope_parameters", "Set both alike.")
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if kind != "default" or any(value is not None for value in scaling.values()):
        name = "rope_scaling" if given.take("rope_scaling", {}) else "rope_parameters"
        raise refused(name, {"rope_type": kind, **scaling}, "null or type default", "Scaled RoPE is not served yet.")
    given.only("partial_rotary_factor", 1.0)
    given.only("rope_interleaved", False)
    found = base if inner is None else inner
    return {"position_embedding": "rope", "rope_base": default_base if found is None else found}


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The fields that `read_rope` takes, in the form that all versions of `transformers` read."""
    return {"rope_theta": model.rope_base, "rope_scaling": None}
