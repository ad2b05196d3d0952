"""Mistral 7B and models of the same form: Llama's, with an optional window in all layers."""

from typing import Any

from ...config import ModelConfig
from .. import common
from ..family import Family
from ..fields import Fields

_WINDOW = 4096  # if the file has no field for it; null: no window


def _read(fields: Fields) -> dict[str, Any]:
    fields.require("num_key_value_heads")
    keys = common.read(fields)
    width = fields.get("sliding_window", None if "sliding_window" in fields else _WINDOW, int)
    return keys | common.read_one_window(width, keys["num_layers"])


def _write(model: ModelConfig) -> dict[str, Any]:
    return common.write(model) | {"sliding_window": common.sliding_window(model)}


FAMILY = Family("mistral", ("MistralForCausalLM",), _read, _write, common.decoder_weights)
