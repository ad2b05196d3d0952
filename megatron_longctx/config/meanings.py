"""The meanings of the keys: the comments beside or above their fields in the sources of this package."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

_FIELD = re.compile(r"    (\w+): [^=]+ = ")


def comments(cls: Any) -> dict[str, str]:
    """Return the comments beside or above the fields of a dataclass, keyed by field."""
    by_field: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if line.startswith("    # "):
            above.append(line.strip("# "))
            continue
        if (field := _FIELD.match(line)) is not None:
            beside = line.partition("  # ")[2]
            by_field[field[1]] = " ".join([*above, *([beside] if beside else [])]).removeprefix("... ")
        above = []
    return by_field


def meanings(cls: Any, prefix: str = "") -> dict[str, str]:
    """Return the meanings of all keys, by their full names."""
    by_key: dict[str, str] = {}
    types = get_type_hints(cls)
    by_field = {name: text for base in reversed(cls.__mro__[:-1]) for name, text in comments(base).items() if text}
    for each in fields(cls):
        if is_dataclass(types[each.name]):
            by_key |= meanings(types[each.name], f"{prefix}{each.name}.")
        else:
            by_key[prefix + each.name] = by_field.get(each.name, "")
    return by_key
