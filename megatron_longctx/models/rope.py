"""Rotary positions in a `config.json`, as all families have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig, RopeScaling
from ..errors import refuse
from .fields import Fields, refused
from .rope_scaling import yarn_stretch

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
