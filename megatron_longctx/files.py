"""Files: where the project's own files are, YAML from untrusted sources, and small files written completely or not at
all.
"""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

_MOST_YAML_BYTES, _MOST_YAML_DEPTH = 2**18, 20  # the largest of ours have 5 KB and 3 levels


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8. After a crash, or on a full disk, `path` holds all of it or what it held before.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def bundled(name: str) -> Path:
    """A folder that stands beside the package in a checkout and inside it when installed: recipes, launch, analysis.

    A checkout's own folder counts even where an editable installation has left copies.

    Raises:
        ValueError: it is in neither place.
    """
    package = Path(__file__).resolve().parent
    places = [package / name]
    if (package.parent / "pyproject.toml").is_file():  # beside an installed package stand those of other projects
        places.insert(0, package.parent / name)
    for folder in places:
        if folder.is_dir():
            return folder
    raise ValueError(f"{name}: expected this folder in {package} or beside it. Install the package again.")


def read_yaml(path: Path) -> Any:
    """The mappings, lists, text and numbers of a YAML file that somebody may have got from anywhere.

    Raises:
        OSError: it cannot be read.
        ValueError: it is large, deep, not UTF-8 or not YAML, or what it says of itself has to be worked out: anchors,
            whose aliases multiply, and `${…}`, which reads the environment.
    """
    if path.stat().st_size > _MOST_YAML_BYTES:
        raise ValueError(f"more than {_MOST_YAML_BYTES:,} bytes")
    content = path.read_text(encoding="utf-8")
    if "${" in content:
        raise ValueError("${…} where values are expected")
    depth = 0
    try:
        for event in yaml.parse(content, Loader=yaml.SafeLoader):  # keeps its own stack: no depth is too much for it
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise ValueError(f"line {event.start_mark.line + 1}: an anchor or alias where values are expected")
            if depth == 0 and isinstance(event, yaml.ScalarEvent):
                raise ValueError("neither keys with values nor a list")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_YAML_DEPTH:
                raise ValueError(f"line {event.start_mark.line + 1}: more than {_MOST_YAML_DEPTH} levels")
        return OmegaConf.to_container(OmegaConf.load(StringIO(content)))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or "not YAML"  # without what the file says
        raise ValueError(f"line {mark.line + 1}: {what}" if mark else what) from None
