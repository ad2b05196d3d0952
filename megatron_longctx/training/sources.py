"""Where the text of a dataset comes from: this Python's library or reference, a file, a folder, lines of JSON."""

from __future__ import annotations

import json
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ..errors import refuse, shown

_TEXT = (".md", ".py", ".rst", ".tex", ".txt")
_NAMED = f"`stdlib`, `pydoc`, a folder, or a file that ends in .jsonl, {', '.join(_TEXT)}"
_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Source:
    """What `--source` and the words beside it say.

    Attributes:
        name: `stdlib` (the sources of this Python's library), `pydoc` (the language reference that `help()` shows), a
            folder, a text file or a `.jsonl` file.
        glob: which files of a folder; None: those with an ending of text, hidden ones and those in hidden folders left
            out.
        joined: the files of each of the folder's own folders are one document, tests left out.
    """

    name: str
    glob: str | None = None
    joined: bool = False

    @property
    def conversations(self) -> Path | None:
        """The file, where its first line is a conversation and has no `text`."""
        path = Path(self.name)
        if not (path.suffix == ".jsonl" and path.is_file()):
            return None
        with path.open("rb") as file:
            try:
                keys = set(json.loads(file.readline()))
            except (ValueError, TypeError, RecursionError):
                return None
        return path if "text" not in keys and keys & {"messages", "prompt", "completion"} else None

    def documents(self) -> Iterator[list[str]]:
        """The texts of every document, in an order that depends on names alone.

        Raises:
            ValueError: says what of the source is missing, empty, or not text.
        """
        if self.name == "stdlib":
            root = Path(sysconfig.get_paths()["stdlib"])
            return _by_package(root, _matching(root, "**/*.py"))
        if self.name == "pydoc":
            return ([text] for _, text in sorted(import_module("pydoc_data.topics").topics.items()))
        path = Path(self.name)
        if self.name and path.is_dir():
            files = _files(path, self.glob)
            return _by_package(path, files) if self.joined else ([text] for file in files if (text := _read(file)))
        if not (path.is_file() and path.suffix in (".jsonl", *_TEXT)):
            raise refuse("--source", self.name, _NAMED, "Check the path, or name a folder and its files by --glob.")
        _refuse_empty(self.name, [path])
        return _lines(path) if path.suffix == ".jsonl" else iter([[_read(path)]])


def _files(root: Path, glob: str | None) -> list[Path]:
    found = _matching(root, "**/*" if glob is None else glob)
    if glob is None:
        seen = [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]
        found = [path for path in seen if path.suffix in _TEXT]
        if not found and seen:
            ends = ", ".join(name or "no ending" for name, _ in Counter(path.suffix for path in seen).most_common(5))
            expected = f"files that end in {', '.join(_TEXT)}; its {len(seen)} files have {ends}"
            raise refuse("--source", root, expected, "Choose others by --glob, for example --glob '**/*.html'.")
    if not found:
        if glob is None:
            raise refuse("--source", root, "files in the folder; it has none", "Check the path.")
        raise refuse("--glob", glob, f"a pattern that files in {root} match; none does", "For example '**/*.txt'.")
    _refuse_empty(str(root), found)
    return found


def _matching(root: Path, glob: str) -> list[Path]:
    try:
        if ".." in Path(glob).parts:
            raise ValueError("it leads out of the folder")
        return [path for path in sorted(root.glob(glob)) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise refuse("--glob", glob, f"a pattern of paths inside {root} ({error})", "For example '**/*.txt'.") from None


def _refuse_empty(source: str, files: Sequence[Path]) -> None:
    if not any(file.stat().st_size for file in files):
        found = "the file is empty" if len(files) == 1 else f"all {len(files)} files are empty"
        raise refuse("--source", source, f"text; {found}", "Check what wrote it.")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _by_package(root: Path, files: Sequence[Path]) -> Iterator[list[str]]:
    """One document for each package (top-level folder or file): its files in order, each a text of its own."""
    packages: dict[str, list[Path]] = {}
    for path in files:
        inside = path.relative_to(root)
        if not _SKIP.intersection(inside.parts):
            packages.setdefault(inside.parts[0], []).append(path)
    if not packages:
        raise refuse("--source", root, f"text outside of tests; all {len(files)} files are tests", "Leave --join out.")
    for paths in packages.values():
        yield [text for path in paths if (text := _read(path))]


def _lines(path: Path) -> Iterator[list[str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}: expected"
            try:
                found = json.loads(line)
                if isinstance(found, dict) and "text" not in found:
                    keys = shown(", ".join(found) or "no key")
                    others = "`messages`, or `prompt` and `completion`, from the first line on"
                    raise KeyError(f"{place} `text` (or {others}); it has {keys}. Rename the key.")
                found["text"].encode()  # which half a pair of surrogates cannot be
            except KeyError as error:
                raise ValueError(error.args[0]) from None
            except (ValueError, TypeError, AttributeError, RecursionError):
                raise ValueError(f'{place} {{"text": "…"}} in UTF-8. Fix or remove the line.') from None
            if not found["text"]:
                raise ValueError(f"{place} a text that is not empty. Fix or remove the line.")
            yield [found["text"]]
