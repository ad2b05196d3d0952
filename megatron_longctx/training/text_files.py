"""The files of a text source: which of a folder are read, and their texts and lines, also compressed."""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeVar

from ..core.errors import refuse

T = TypeVar("T")

JSONL, TEXT = ".jsonl", (".md", ".py", ".rst", ".tex", ".txt")
ENDINGS = f"{JSONL}, {', '.join(TEXT)}, or one of these and .gz or .zst"
CONVERSATION_KEYS = {"messages", "prompt", "completion"}
_ZSTD = "backports.zstd"  # in Python's own library from 3.14 on
_MAX_BYTES = 2**30  # of a document in memory: a compressed file may be a million times as large as it looks


def is_jsonl(path: Path) -> bool:
    return _ending(path) == JSONL


def is_text(path: Path) -> bool:
    return _ending(path) in TEXT


def _ending(path: Path) -> str:
    """Return the ending of a file's name without that of its compression."""
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def files_of(root: Path, glob: str | None) -> list[Path]:
    """Return the files of a folder that are read, sorted.

    Args:
        glob: pattern of the files; None for text and JSONL files that are not hidden, nor in hidden folders.

    Raises:
        ValueError: there are none, all are empty, or one of them lies outside of the folder.
    """
    found = matching(root, "**/*" if glob is None else glob)
    if glob is None:
        visible = [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]
        found = [path for path in visible if is_text(path) or is_jsonl(path)]
        if not found and visible:
            suffixes = Counter(path.suffix for path in visible).most_common(5)
            ends = ", ".join(name or "no ending" for name, _ in suffixes)
            expected = f"files that end in {ENDINGS}; its {len(visible)} files have {ends}"
            raise refuse("--source", root, expected, "Choose other text files by --glob, for example '**/*.html'.")
    if not found:
        if glob is None:
            raise refuse("--source", root, "files in the folder; it has none", "Check the path.")
        raise refuse("--glob", glob, f"a pattern that files in {root} match; none does", "For example '**/*.txt'.")
    for path in found:
        if not (target := path.resolve()).is_relative_to(root.resolve()):
            expected = f"files inside the folder; {path} is a link to {target}"
            raise refuse("--source", root, expected, "Name the folder that it leads to, or copy the file.")
    refuse_empty(str(root), found)
    return found


def matching(root: Path, glob: str) -> list[Path]:
    """Return the files of a folder that match a pattern, sorted.

    Raises:
        ValueError: the pattern is none, or leads out of the folder.
    """
    try:
        if ".." in Path(glob).parts:
            raise ValueError("it leads out of the folder")
        return [path for path in sorted(root.glob(glob)) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise refuse("--glob", glob, f"a pattern of paths inside {root} ({error})", "For example '**/*.txt'.") from None


def refuse_empty(source: str, files: Sequence[Path]) -> None:
    if not any(file.stat().st_size for file in files):
        actual = "the file is empty" if len(files) == 1 else f"all {len(files)} files are empty"
        raise refuse("--source", source, f"text; {actual}", "Check what wrote it.")


def read_text(path: Path) -> str:
    """Return the text of a file. Bytes that are not UTF-8 are replaced.

    Raises:
        ValueError: the file is larger than a document can be, cannot be decompressed, or has lines of JSON.
    """
    with _opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace").read(_MAX_BYTES)
    if len(text) == _MAX_BYTES:
        raise ValueError(f"{path}: expected a text of less than {_MAX_BYTES:,} characters. Split the file.")
    if _keys(text.partition("\n")[0]) & {"text", *CONVERSATION_KEYS}:
        remedy = f"Let its name end in {JSONL}: then each line is a document."
        raise ValueError(f"{path}: expected text, but its first line is a document in JSON. {remedy}")
    return text


def parsed(path: Path, parse: Callable[[bytes], T]) -> Iterator[T]:
    """Yield the parsed lines of a file. Errors have the file and the line."""
    with _opened(path) as file:
        for number, line in enumerate(iter(partial(file.readline, _MAX_BYTES), b""), start=1):
            try:
                if len(line) == _MAX_BYTES:
                    raise ValueError(f"expected less than {_MAX_BYTES:,} bytes. Split the document.")
                yield parse(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def first_keys(path: Path) -> set[str]:
    """Return the keys of the object in JSON that is the first line of a file, if it is one."""
    with _opened(path) as file:
        return _keys(file.readline(_MAX_BYTES))


def _keys(line: str | bytes) -> set[str]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return set()
    return set(content) if isinstance(content, dict) else set()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if its name ends in .gz or .zst."""
    broken: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    opener: Any = open
    if path.suffix == ".gz":
        opener = gzip.open
    elif path.suffix == ".zst":
        zstd = _zstd(path)
        opener, broken = zstd.open, (*broken, zstd.ZstdError)
    try:
        with opener(path, "rb") as file:
            yield file
    except broken as error:
        raise ValueError(f"{path}: damaged, or not a file in {path.suffix} ({error}). Fetch it again.") from None


def _zstd(path: Path) -> Any:
    if sys.version_info >= (3, 14):
        return import_module("compression.zstd")
    try:
        return import_module(_ZSTD)
    except ImportError:
        raise ValueError(
            f"{path}: expected the package {_ZSTD}. Run pip install 'megatron-longctx[data]', or decompress the file."
        ) from None
