"""The `keys` verb: the keys of the configuration with their defaults, allowed values and meanings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ..config import Config, keys_of
from ..config.meanings import meanings
from ..core.errors import refuse


def show(patterns: Sequence[str]) -> None:
    """Print the keys with a pattern in their name, or at the beginning of a word of their meaning; or all."""
    meaning = meanings(Config)
    found = [
        key for key in keys_of(Config).values()
        if not patterns or any(each in key.name or f" {each}" in f" {meaning[key.name]}" for each in patterns)
    ]  # fmt: skip
    if not found:
        from ..training.compose import nearest_names  # takes a second to import

        near = nearest_names(patterns[0], list(meaning))
        hint = f"Nearest: {near}." if near else "`megatron-longctx keys` prints all keys."
        raise refuse("keys", " ".join(patterns), "a part of a key's name, or a word of its meaning", hint)
    for key in found:
        kind = {int: "an integer, ", float: "a number, "}.get(key.kind, "")
        print(f"{key.name}={key.default_text}   ({kind}{key.may_be})")
        for line in textwrap.wrap(meaning[key.name], 110):
            print(f"    {line}")
