"""Families of published models: what their `config.json` says in this project's words, and how their weights are kept.

A family is a module with one `Family`, entered in FAMILIES. Nothing here knows of ranks, files or Megatron.
"""

from .family import Dims, Family, Weight
from .fields import Fields
from .known import FAMILIES, family_of_model, family_of_source
from .rope import read_rope, write_rope

__all__ = [
    "FAMILIES",
    "Dims",
    "Family",
    "Fields",
    "Weight",
    "family_of_model",
    "family_of_source",
    "read_rope",
    "write_rope",
]
