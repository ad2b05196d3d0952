"""Write `docs/configuration.md` from the typed configuration: `python -m analysis.configuration_page`.

The meaning of a key is the comment beside or above its field in the sources of `megatron_longctx/config`.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from megatron_longctx.config import Config, keys_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
_HEAD = """# Configuration

This page lists every key. Set one as `key=value` after a verb. `megatron-longctx train --cfg job` prints the whole
configuration. [Training](training.md) explains the keys that most runs set.

`python -m analysis.configuration_page` generates this page from
[`megatron_longctx/config`](../megatron_longctx/config/tree.py), and a test compares them.
"""
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


def page() -> str:
    """Return the page in Markdown."""
    meaning, sections = meanings(Config), get_type_hints(Config)
    lines = [_HEAD]
    for section in sections:
        lines.append(f"## {section}\n")
        about = inspect.getdoc(sections[section]) or ""
        if about and not about.startswith(sections[section].__name__):  # else dataclass generated it
            lines.append(" ".join(about.split()) + "\n")
        lines += ["| key | default | may be | meaning |", "|---|---|---|---|"]
        for key in keys_of(Config).values():
            if not key.name.startswith(f"{section}."):
                continue
            default = "null" if key.default is None else str(key.default).lower() if key.kind is bool else key.default
            may_be = (key.bounds.expected if key.bounds else "true or false") + (", or null" if key.nullable else "")
            cells = (f"`{key.name}`", f"`{default}`", may_be, meaning[key.name])
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("*", "\\*") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
