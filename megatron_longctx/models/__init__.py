"""Families of published models: the meaning of their `config.json` and the form of their weights.

A family is a file in `families/` whose `FAMILY` is a `Family`: the fields that it reads and writes, and its `Weight`s.
`huggingface` reads and writes folders, tensors one by one.
`rope_frequencies` reads the fields of RoPE and computes its frequencies. `chat` turns messages into text, and `trees`
stores equal beginnings of sequences once. Nothing here depends on ranks or Megatron.
"""

from .families import FAMILIES, family_of_model, family_of_source
from .family import Family, check_same_function
from .fields import Fields
from .rope_frequencies import read_rope, write_rope
from .weights import Dims, Weight, in_file_order
