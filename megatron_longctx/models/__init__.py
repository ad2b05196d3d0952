"""Families of published models: what their `config.json` says in this project's words, and how their weights are kept.

A family is a file in `families/` whose `FAMILY` is a `Family`: the fields that it reads and writes, and its `Weight`s.
`source` finds what a folder or a file has; `huggingface` and `gguf_file` read tensors one by one; `rope` and
`rope_scaling` are RoPE's frequencies; `chat` makes text of messages. Nothing here knows of ranks or Megatron.
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
