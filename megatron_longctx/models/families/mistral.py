"""Mistral 7B and what has its form: Llama's, where all layers may have a window."""

from __future__ import annotations

from typing import Any

from ...config import ModelConfig
from ..family import Family
from ..fields import Fields
from ..rope import read_rope, write_rope
from ..windows import SLIDING, read_windows, sliding_window
from .llama import common_weights, read_common, write_common

_WINDOW = 4096  # where the file does not say; null is none


def _read(given: Fields) -> dict[str, Any]:
    common = read_common(given)
    width = given.take("sliding_window", None if given.has("sliding_window") else _WINDOW, int)
    windows = read_windows(width, [] if width is None else [SLIDING] * common["num_layers"])
    given.need("num_key_value_heads")
    return {**common, **read_rope(given), **windows}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_common(model), **write_rope(model), "sliding_window": sliding_window(model)}


FAMILY = Family("mistral", ("MistralForCausalLM",), _read, _write, common_weights)
