"""Digests of a checkpoint's files, by which damage to them is found before they are loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .. import files

DIGESTS = "digests.json"
# Of those in Python the fastest on processors with instructions for it, as servers have.
_ALGORITHM = "sha256"
_MOST_THREADS = 8
_DATA = ".distcp"  # the files with tensors: nearly all bytes of a checkpoint

Digests = dict[str, tuple[int, str]]
"""By file name: its size in bytes, and its digest."""


def of_files(path: Path, names: Iterable[str]) -> Digests:
    """Sizes and digests of files in ``path``, read by several threads.

    Raises:
        OSError: one cannot be read.
    """
    names = list(names)
    with ThreadPoolExecutor(max_workers=min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(path / name), names), strict=True))


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, _ALGORITHM).hexdigest()
        return stream.tell(), found


def write(path: Path, digests: Digests) -> None:
    """Write the digests of a checkpoint's files beside them."""
    files.write_text(path / DIGESTS, json.dumps({"algorithm": _ALGORITHM, "files": digests}, indent=1) + "\n")


def exist(path: Path) -> bool:
    """Whether a checkpoint has digests; those of earlier versions do not."""
    return (path / DIGESTS).exists()


def damage(path: Path, part: int = 0, parts: int = 1, *, data: bool = True) -> str | None:
    """What is wrong with one of ``parts`` equal parts of a checkpoint's files; None if they are as they were saved.

    Sizes are compared for all files.

    Args:
        data: compare also the digests of files with tensors.
    """
    try:
        if not exist(path):
            return None
        expected = _read(path)
        for name, (size, _) in expected.items():
            found = (path / name).stat().st_size if (path / name).is_file() else 0
            if found != size:
                return f"{path / name} has {found} bytes, expected {size}"
        largest_first = sorted(expected, key=lambda name: (-expected[name][0], name))
        mine = [name for name in largest_first[part::parts] if data or not name.endswith(_DATA)]
        now = of_files(path, mine)
    except OSError as error:
        return f"{path} cannot be read ({error}), expected the files of a checkpoint"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{path / DIGESTS} is damaged ({error}), expected the digests of the checkpoint's files"
    for name in mine:
        if now[name] != expected[name]:
            return f"{path / name} is damaged: its {_ALGORITHM} is not the one it was saved with"
    return None


def _read(path: Path) -> Digests:
    content: Mapping[str, Any] = json.loads((path / DIGESTS).read_text(encoding="utf-8"))
    if content["algorithm"] != _ALGORITHM:
        raise ValueError(f"algorithm {content['algorithm']!r}")
    found = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
    for name in found:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no file of this checkpoint")
    return found
