"""Which family a published model, or a model of this project, is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..errors import refuse
from .families import FAMILIES
from .family import Family
from .fields import refused

_OTHERS = "Models of other architectures are not served yet."
_CAPPED = "They cap logits, which no kernel here does."
_NOT_SERVED = {
    **dict.fromkeys(("Gemma2ForCausalLM", "gemma2"), _CAPPED),
    "Gemma3ForConditionalGeneration": "Its images are not served; take a model of text alone.",
}
"""By architecture or `model_type`, why."""


def family_of_source(config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`.

    Raises:
        ValueError: none has its architecture.
    """
    named = config.get("architectures") or []
    for family in FAMILIES:
        if any(name in family.architectures for name in named) or (
            not named and config.get("model_type") == family.name
        ):
            return family
    known = ", ".join(family.architectures[0] for family in FAMILIES)
    given = named if named else config.get("model_type")
    why = next((_NOT_SERVED[name] for name in _NOT_SERVED if name in (*named, config.get("model_type"))), _OTHERS)
    raise refused("architectures", given, f"one of {known}", why)


def family_of_model(model: ModelConfig) -> Family:
    """The family whose `config.json` can describe a model: the one of its own name, else the first.

    Raises:
        ValueError: none can; says of each which key it has no field for.
    """
    reasons = []
    for family in sorted(FAMILIES, key=lambda family: family.name != model.name):
        try:
            family.config_of(model, 1, 1)
            return family
        except ValueError as error:
            reasons.append(str(error))
    raise refuse("model", model.name, "one that a family can describe", " ".join(reasons))
