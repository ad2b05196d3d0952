"""Families of published models, one file each, whose `FAMILY` defines it. Adding one is adding a file here."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ...config import ModelConfig
from ...core.errors import refuse
from ..family import Family
from ..fields import RESTORE, refuse_field

FAMILIES: tuple[Family, ...] = tuple(
    import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)
)
_LATENTS = "It has latents (MLA) beside its recurrent layers, which are layers K here."
_SINGLE = "Its layers have a mixer or an MLP alone, with squared ReLU, and attention has no positions."
_OLMO = "Its layers of attention have norms of whole queries and keys, and none before them, other than its delta nets."
_CAPPED = "They cap logits, which no kernel here does."
# Reasons, keyed by architecture or `model_type`.
_NOT_SUPPORTED = {
    **dict.fromkeys(("Gemma2ForCausalLM", "gemma2"), _CAPPED),
    **dict.fromkeys(("KimiLinearForCausalLM", "kimi_linear"), _LATENTS),
    **dict.fromkeys(("NemotronHForCausalLM", "nemotron_h"), _SINGLE),
    **dict.fromkeys(("OlmoHybridForCausalLM", "olmo_hybrid"), _OLMO),
    "Gemma3ForConditionalGeneration": "Its images are not supported; take a text-only model.",
}


def family_of_source(config: Mapping[str, Any]) -> Family:
    """Return the family of a `config.json`. Raises ValueError: no family has its architecture."""
    architectures, model_type = config.get("architectures") or [], config.get("model_type")
    if not isinstance(architectures, list):
        raise refuse_field("architectures", architectures, "a list", RESTORE)
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures) or (
            not architectures and model_type == family.name
        ):
            return family
    known = ", ".join(family.architectures[0] for family in FAMILIES)
    reasons = [reason for name, reason in _NOT_SUPPORTED.items() if name in (*architectures, model_type)]
    remedy = reasons[0] if reasons else "Models of other architectures are not supported yet."
    raise refuse_field("architectures", architectures or model_type, f"one of {known}", remedy)


def family_of_model(model: ModelConfig) -> Family:
    """Return the family whose `config.json` can describe a model, preferably the one with the model's name.

    Raises ValueError: no family can; for each, the message names the key that it has no field for.
    """
    reasons = []
    for family in sorted(FAMILIES, key=lambda family: family.name != model.name):
        try:
            family.config_of(model, 1, 1)
            return family
        except ValueError as error:
            reasons.append(str(error))
    raise refuse("model", model.name, "one that a family can describe", " ".join(reasons))
