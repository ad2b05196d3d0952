"""Write `docs/configuration.md` from the typed configuration: `python -m analysis.configuration_page`.

The meaning of a key is the comment beside or above its field in the sources of `megatron_longctx/config`.
"""

import inspect
from pathlib import Path
from typing import get_type_hints

from megatron_longctx.config import Config, keys_of
from megatron_longctx.config.bounds import meanings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
_HEAD = """# Configuration

This page lists every key. Set one as `key=value` after a verb. `megatron-longctx train --cfg job` prints the whole
configuration, and `megatron-longctx keys PATTERN` some keys with their meanings. [Training](training.md) explains the
keys that most runs set.

`python -m analysis.configuration_page` generates this page from
[`megatron_longctx/config`](../megatron_longctx/config/tree.py), and a test compares them.
"""


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
            cells = (f"`{key.name}`", f"`{key.default_text}`", key.may_be, meaning[key.name])
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("*", "\\*") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
