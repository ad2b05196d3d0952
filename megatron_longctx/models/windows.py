"""Windows of layers in a `config.json`: there a window counts the token itself, here the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import ModelConfig
from .fields import refused

SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(width: int | None, types: Sequence[Any]) -> dict[str, Any]:
    """Keys of `ModelConfig`.

    Args:
        width: `sliding_window`; None: there are no windows.
        types: of the layers, as `layer_types` has them.

    Raises:
        ValueError: a type that is not known, layers with windows that have none, or windows of another pattern than all
            layers but every k-th.
    """
    for name in types:
        if name not in (SLIDING, FULL):
            raise refused("layer_types", name, f"{FULL} and {SLIDING}", "Layers of other types are not served.")
    windowed = [name == SLIDING for name in types]
    if not any(windowed):
        return {"window": None, "window_pattern": None}
    if width is None:
        raise refused("sliding_window", None, f"a number with layers of {SLIDING}", "Restore the model's config.json.")
    pattern = None if all(windowed) else windowed.index(False) + 1
    if pattern is not None and windowed != [bool(number % pattern) for number in range(1, len(types) + 1)]:
        expected = f"{SLIDING} in all layers, or in all but every k-th"
        raise refused("layer_types", list(types), expected, "Other patterns are not served.")
    return {"window": width - 1, "window_pattern": pattern}


def layer_types(model: ModelConfig) -> list[str]:
    """As `read_windows` takes them."""
    pattern = model.window_pattern
    return [
        FULL if model.window is None or (pattern is not None and number % pattern == 0) else SLIDING
        for number in range(1, model.num_layers + 1)
    ]


def sliding_window(model: ModelConfig) -> int | None:
    """As `read_windows` takes it."""
    return None if model.window is None else model.window + 1
