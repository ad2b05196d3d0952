"""Families of published models: what their `config.json` says in this project's words, and how their weights are kept.

A family is a file in `families/` whose `FAMILY` is a `Family`. Nothing here knows of ranks, files or Megatron.
"""

from .families import FAMILIES
from .family import Dims, Family, Weight
from .fields import Fields
from .known import family_of_model, family_of_source
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
