"""Folders that ship with the package, small files from untrusted sources, and atomic writes of small files."""

from __future__ import annotations

import os
import stat
from copy import deepcopy
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

_MAX_YAML_BYTES, _MAX_YAML_DEPTH = 2**18, 20  # the largest files of this project have 5 KB and 3 levels


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8, atomically: after a crash or on a full disk, `path` is either complete or unchanged."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(partial, flags, 0o666), "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file from an untrusted source, which may be a device or a pipe without an end.

    Raises ValueError: it is not a regular file, or has more than `most` bytes. Raises OSError: it cannot be read.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ValueError("a device or a pipe, not a file")
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most:,} bytes")
    return content


def bundled(name: str) -> Path:
    """Return a folder that is beside the package in a checkout and inside it when installed: recipes, launch, analysis.

    The checkout's takes precedence over copies that an editable installation has left. Refuse one that is nowhere.
    """
    package = Path(__file__).resolve().parents[1]
    places = [package / name]
    if (package.parent / "pyproject.toml").is_file():  # folders beside an installed package belong to other projects
        places.insert(0, package.parent / name)
    for folder in places:
        if folder.is_dir():
            return folder
    raise ValueError(f"{name}: expected this folder in {package} or beside it. Install the package again.")


def read_yaml(path: Path) -> Any:
    """Return the mappings, lists, text and numbers of a YAML file from an untrusted source, or raise OSError.

    Raises ValueError: it is large, deep, not UTF-8 or not YAML, or it contains expressions: anchors, whose aliases
    multiply, or `${…}`, which reads the environment.
    """
    return deepcopy(_values(read_bytes(path, _MAX_YAML_BYTES).decode()))


@lru_cache(maxsize=16)  # a search for the longest sequence reads its cluster a thousand times
def _values(content: str) -> Any:
    import yaml  # here, so that what reads no file needs torch and numpy alone
    from omegaconf import OmegaConf

    if "${" in content:
        raise ValueError("${…} where values are expected")
    depth = 0
    try:
        for event in yaml.parse(content, Loader=yaml.SafeLoader):  # does not recurse, so no depth overflows its stack
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise ValueError(f"line {event.start_mark.line + 1}: an anchor or alias where values are expected")
            if depth == 0 and isinstance(event, yaml.ScalarEvent):
                raise ValueError("neither keys with values nor a list")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_YAML_DEPTH:
                raise ValueError(f"line {event.start_mark.line + 1}: more than {_MAX_YAML_DEPTH} levels")
        return OmegaConf.to_container(OmegaConf.load(StringIO(content)))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "not YAML"  # the full message would quote the file
        raise ValueError(f"line {mark.line + 1}: {problem}" if mark else problem) from None
