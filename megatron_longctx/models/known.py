"""The families that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..errors import refuse
from .family import Family
from .fields import refused
from .gemma3 import GEMMA3
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA3)


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
    raise refused("architectures", given, f"one of {known}", "Models of other architectures are not served yet.")


def family_of_model(model: ModelConfig) -> Family:
    """The first family whose `config.json` can describe a model.

    Raises:
        ValueError: none can; says of each which key it has no field for.
    """
    reasons = []
    for family in FAMILIES:
        try:
            family.config_of(model, 1, 1)
            return family
        except ValueError as error:
            reasons.append(str(error))
    raise refuse("model", model.name, "one that a family can describe", " ".join(reasons))
