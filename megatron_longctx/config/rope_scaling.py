"""How RoPE is stretched beyond the length a model was first trained on: the keys `model.rope_scaling.*`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import refuse
from .bounds import choice, number

# By kind, the keys that it reads besides `kind`.
_LENGTHS = ("factor", "original_length")
_KEYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "llama3": (*_LENGTHS, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_LENGTHS, "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
ROPE_SCALINGS = tuple(_KEYS)


@dataclass(frozen=True)
class RopeScaling:
    """linear: positions are divided by `factor`. ntk: the base grows so that the slowest pair turns `factor` times
    slower. llama3: slow pairs do, fast ones stay, with a ramp between wavelengths. yarn: the same with a ramp between
    pairs, and queries and keys are stretched. Defaults are those of the `transformers` package."""

    kind: str = choice("none", ROPE_SCALINGS)
    factor: float = number(1.0, 1, 1e6)
    original_length: int | None = number(None, 1, 10**9)  # tokens before scaling; required by llama3 and yarn
    # llama3: pairs that rotate fewer times than this in `original_length` are scaled fully.
    low_freq_factor: float = number(1.0, 0, 1e6, above=True)
    high_freq_factor: float = number(4.0, 0, 1e6, above=True)
    beta_fast: float = number(32.0, 0, 1e6, above=True)  # yarn: pairs that rotate more often than this are not scaled.
    beta_slow: float = number(1.0, 0, 1e6, above=True)
    # yarn: factor for cosines and sines; null: 0.1 ln(factor) + 1, the paper's rule.
    attention_factor: float | None = number(None, 0, 1e6, above=True)
    truncate: bool = True  # yarn: the ramp begins and ends at whole pairs


def check_rope_scaling(scaling: RopeScaling, head_dim: int, base: float) -> None:
    """Refuse keys that the kind does not read, and values that give it no frequencies.

    Raises:
        ValueError: names the key and value, what was expected and what to do.
    """
    name, kind = "model.rope_scaling", scaling.kind
    for key in fields(RopeScaling):
        value = getattr(scaling, key.name)
        if key.name != "kind" and key.name not in _KEYS[kind] and value != key.default:
            default = "null" if key.default is None else str(key.default).lower()
            kinds = " or ".join(kind for kind, keys in _KEYS.items() if key.name in keys)
            raise refuse(
                f"{name}.{key.name}",
                value,
                f"{default}, its default, with {name}.kind={kind}",
                f"Only {kinds} reads it.",
            )
    if "original_length" in _KEYS[kind] and scaling.original_length is None:
        remedy = "Set it to the tokens that the model was trained on before it was stretched."
        raise refuse(f"{name}.original_length", None, f"a number with {name}.kind={kind}", remedy)
    for lower, upper in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        least, most = getattr(scaling, lower), getattr(scaling, upper)
        if lower in _KEYS[kind] and most <= least:
            raise refuse(f"{name}.{upper}", most, f"more than {name}.{lower}={least}", "Raise it, or lower the other.")
    if kind == "ntk" and head_dim < 4:
        raise refuse(
            "model.head_dim", head_dim, f"at least 4 with {name}.kind=ntk", "One pair alone has no slower one."
        )
    if kind == "yarn" and base <= 1:
        raise refuse("model.rope_base", base, f"more than 1 with {name}.kind=yarn", "All pairs would turn alike.")
