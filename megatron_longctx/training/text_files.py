"""The source of a dataset: which files of a folder are read, and their texts, lines and rows, also compressed."""

from __future__ import annotations

import gzip
import io
import json
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from glob import has_magic
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from ..config.extras import install
from ..core.errors import refuse

T = TypeVar("T")
Row = bytes | Mapping[str, Any]  # A line of JSON, or the row of a table

JSONL, TEXT, TABLE = ".jsonl", (".md", ".py", ".rst", ".tex", ".txt"), ".parquet"
ENDINGS = f"{JSONL}, {', '.join(TEXT)}, these with .gz or .zst, or {TABLE}"
CONVERSATION_KEYS = {"messages", "prompt", "completion"}
ROLLOUT_KEYS = ({"prompt", "responses"}, {"prompt", "children"})
_SOURCES = f"`stdlib`, a folder, a pattern, or a file that ends in {ENDINGS}"
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_MAX_BYTES = 2**30  # of a document in memory: a compressed file may be a million times as large as it looks
_BUFFER_BYTES = 2**18
_ROWS = 64  # of a table that are in memory at once
_CARD = "README.md"  # describes a dataset of the Hugging Face hub
_SPLIT = re.compile(r"(?<![a-z0-9])(train(?:ing)?|test(?:ing)?|eval(?:uation)?|val(?:id(?:ation)?)?|dev)(?![a-z0-9])")


@dataclass(frozen=True)
class Source:
    """The origin of a dataset's text. Lines of JSONL and rows of tables are documents, as are files of other text."""

    name: str  # `stdlib` (the sources of this Python's library), a folder, a file, or a pattern of files
    glob: str | None = None  # of a folder's files; None: text, JSONL and tables that are not hidden
    joined: bool = False  # make one document of the files of each sub-folder, without tests
    more: tuple[str, ...] = ()  # further folders, files and patterns, after the first
    text_key: str | None = None  # of a document's text; None for `text`, or conversations or rollouts by the first line

    @classmethod
    def of(cls, names: Sequence[str], glob: str | None, joined: bool, text_key: str | None) -> Source:
        """Return the source of a command line, with one name or more."""
        return cls(names[0], glob, joined, tuple(names[1:]), text_key)

    def __str__(self) -> str:
        return " ".join((self.name, *self.more))

    @cached_property
    def kind(self) -> str:
        """`rollouts`, `conversations` or `text`, by the first line or row if all files have some and no key is set."""
        if self.text_key or not self.has_files or not all(map(has_rows, self.files)):
            return "text"
        keys = first_keys(next(file for file in self.files if file.stat().st_size))
        if any(needed <= keys for needed in ROLLOUT_KEYS) and all(map(is_jsonl, self.files)):
            return "rollouts"
        return "conversations" if "text" not in keys and keys & CONVERSATION_KEYS else "text"

    def documents(self) -> Iterator[list[str]] | None:
        """Return the texts of every document if one may be of several files, in the order of their names; else None."""
        if not self.has_files:
            root = Path(sysconfig.get_paths()["stdlib"])
            return _by_package(root, matching(root, "**/*.py"))
        return _by_package(Path(self.name), self.files) if self.joined else None

    @property
    def has_files(self) -> bool:
        """Whether it is not of Python's library."""
        return self.name != "stdlib" or bool(self.more)

    @cached_property
    def files(self) -> list[Path]:
        """The files, in the order of sources and names. Refuse what is missing, has no text, or is named twice."""
        found: list[Path] = []
        for name in (self.name, *self.more):
            found += self._files_of(name)
        if self.joined and (self.more or not Path(self.name).is_dir() or any(map(has_rows, found))):
            expected = "one folder of text with --join; lines of JSONL are documents of their own"
            raise refuse("--source", self, expected, "Leave --join out.")
        if len({*found}) < len(found):
            twice = next(file for number, file in enumerate(found) if file in found[:number])
            raise refuse("--source", self, f"each file once; {twice} is in two of these", "Leave one out.")
        return found

    def _files_of(self, name: str) -> list[Path]:
        path = Path(name)
        if name and path.is_dir():
            return files_of(path, self.glob)
        if path.is_file() and (has_rows(path) or is_text(path)):
            refuse_empty(name, [path])
            return [path]
        if has_magic(name) and not path.exists():
            fixed = next(number for number, part in enumerate(path.parts) if has_magic(part))
            root, pattern = Path(*path.parts[:fixed]), str(Path(*path.parts[fixed:]))
            if matching(root, pattern):
                return files_of(root, pattern)
            raise refuse("--source", name, "a pattern that files match; none does", "Check the path.")
        raise refuse("--source", name, _SOURCES, "Check the path, or name a folder and its files by --glob.")


def _by_package(root: Path, files: Sequence[Path]) -> Iterator[list[str]]:
    """Yield one document per package (a top-level folder or file): the texts of its files, in order."""
    packages: dict[str, list[Path]] = {}
    for path in files:
        inside = path.relative_to(root)
        if not _SKIPPED_FOLDERS.intersection(inside.parts):
            packages.setdefault(inside.parts[0], []).append(path)
    if not packages:
        raise refuse("--source", root, f"text outside of tests; all {len(files)} files are tests", "Leave --join out.")
    for paths in packages.values():
        yield [text for path in paths if (text := read_text(path))]


class Piece(NamedTuple):
    """A part of a file.

    size: its bytes, about.
    begin, end: of lines, the bytes in which they begin; of parquet, the row groups. `end` is None for the whole file.
    """

    path: Path
    size: int
    begin: int = 0
    end: int | None = None


def pieces(path: Path, most: int) -> Iterator[Piece]:
    """Yield the parts of a file, in order: of lines that are not compressed, at most `most` bytes each."""
    size = path.stat().st_size
    if path.suffix == JSONL:
        yield from (Piece(path, min(most, size - at), at, at + most) for at in range(0, size, most))
    elif path.suffix == TABLE:
        with _table(path) as table:
            count = table.metadata.num_row_groups
        yield from (Piece(path, size // count, number, number + 1) for number in range(count))
    else:
        yield Piece(path, size)


def has_rows(path: Path) -> bool:
    """Whether a file's lines or rows are documents."""
    return is_jsonl(path) or path.suffix == TABLE


def is_jsonl(path: Path) -> bool:
    return _ending(path) == JSONL


def is_text(path: Path) -> bool:
    return _ending(path) in TEXT


def _ending(path: Path) -> str:
    """Return the ending of a file's name without that of its compression."""
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def files_of(root: Path, glob: str | None) -> list[Path]:
    """Return the files of a folder that are read, sorted. Refuse if there is none, all are empty, or one lies outside.

    Without the pattern `glob`, they are text and JSONL files that are not hidden, nor in hidden folders.
    """
    found = matching(root, "**/*" if glob is None else glob)
    if glob is None:
        visible = [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]
        found = [path for path in visible if is_text(path) or has_rows(path)]
        if rows := [path.relative_to(root) for path in found if has_rows(path)]:
            found = [path for path in found if path != root / _CARD]
            _refuse_splits(root, rows)
        if not found and visible:
            suffixes = Counter(path.suffix for path in visible).most_common(5)
            ends = ", ".join(name or "no ending" for name, _ in suffixes)
            expected = f"files that end in {ENDINGS}; its {len(visible)} files have {ends}"
            remedy = "Choose other text files by --glob, for example '**/*.html'."
            remedy = "Save the dataset by `to_parquet`." if ".arrow" in ends else remedy
            raise refuse("--source", root, expected, remedy)
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


def _refuse_splits(root: Path, found: Sequence[Path]) -> None:
    """Refuse what a dataset has for training together with what it has to measure that."""
    words = [word for path in found for word in _SPLIT.findall(str(path).lower())[:1]]
    if len({word[:3] for word in words}) > 1:
        expected = f"files of one split; their names have {', '.join(sorted(set(words)))}"
        raise refuse("--source", root, expected, f"Choose by --glob, for example '**/*{words[0]}*'.")


def matching(root: Path, glob: str) -> list[Path]:
    """Return the files of a folder that match a pattern, sorted. Refuse a pattern that leads out of the folder."""
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

    Refuse a file that is larger than a document can be, cannot be decompressed, or has lines of JSON.
    """
    with _opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace").read(_MAX_BYTES)
    if len(text) == _MAX_BYTES:
        raise ValueError(f"{path}: expected a text of less than {_MAX_BYTES:,} characters. Split the file.")
    if _keys(text.partition("\n")[0]) & {"text", *CONVERSATION_KEYS}:
        remedy = f"Let its name end in {JSONL}: then each line is a document."
        raise ValueError(f"{path}: expected text, but its first line is a document in JSON. {remedy}")
    return text


def parsed(part: Path | Piece, parse: Callable[[Row], T], keys: Collection[str] = ()) -> Iterator[T]:
    """Yield the parsed lines or rows of a file, or of a part of it. Errors have the file and the line.

    Of a table, the columns `keys` are read, or all if it has none of them.
    """
    piece = part if isinstance(part, Piece) else Piece(part, 0)
    rows: Iterator[Row] = _rows(piece, keys) if piece.path.suffix == TABLE else _lines(piece)
    for number, row in enumerate(rows, start=1):
        try:
            if isinstance(row, bytes) and len(row) >= _MAX_BYTES:
                raise ValueError(f"expected less than {_MAX_BYTES:,} bytes. Split the document.")
            result = parse(row)
        except ValueError as error:
            raise ValueError(f"{piece.path}:{_rows_before(piece) + number}: {error}") from None
        yield result


def content(row: Row) -> Any:
    """Return what a line of JSON or a row of a table has."""
    return json.loads(row) if isinstance(row, bytes) else row


def first_keys(path: Path) -> set[str]:
    """Return the keys of a file's first line, if that is an object in JSON, or the columns of a table."""
    if path.suffix == TABLE:
        with _table(path) as table:
            return set(table.schema_arrow.names)
    with _opened(path) as file:
        return _keys(file.readline(_MAX_BYTES))


def _lines(piece: Piece) -> Iterator[bytes]:
    """Yield the lines that begin in a piece; too long ones are cut."""
    with _opened(piece.path) as file:
        if piece.begin:  # from the end of the line before it, if that is there, so that no line is left out
            file.seek(piece.begin - 1)
            while (rest := file.readline(_MAX_BYTES)) and not rest.endswith(b"\n"):
                pass
        while piece.end is None or file.tell() < piece.end:
            if not (line := file.readline(_MAX_BYTES)):
                break
            yield line


def _rows(piece: Piece, keys: Collection[str]) -> Iterator[Mapping[str, Any]]:
    with _table(piece.path) as table:
        names = table.schema_arrow.names
        groups = range(table.metadata.num_row_groups) if piece.end is None else range(piece.begin, piece.end)
        columns = [name for name in names if name in keys] or names
        for batch in table.iter_batches(_ROWS, row_groups=list(groups), columns=columns):
            batch.validate(full=True)  # text may not be UTF-8
            yield from batch.to_pylist()


def _rows_before(piece: Piece) -> int:
    """Return how many lines or rows of the file are before a piece."""
    if piece.path.suffix == TABLE:
        with _table(piece.path) as table:
            return sum(table.metadata.row_group(number).num_rows for number in range(piece.begin))
    count, left = 0, piece.begin - 1
    with open(piece.path, "rb") as file:
        while left > 0 and (block := file.read(min(left, 2**20))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count + (piece.begin > 0)


@contextmanager
def _table(path: Path) -> Iterator[Any]:
    """Open a `ParquetFile`."""
    with _pyarrow(path) as pyarrow, open(path, "rb") as file, pyarrow.parquet.ParquetFile(file) as table:
        yield table


@contextmanager
def _pyarrow(path: Path) -> Iterator[Any]:
    """Provide pyarrow to read a file. Without the package, or if the file is damaged, the error is a ValueError."""
    try:
        pyarrow, _ = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError(f"{path}: expected the package pyarrow. Run {install('data')}.") from None
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # of the system, not of pyarrow
            raise
        raise _damaged(path, str(error).split("\n")[0]) from None


def _damaged(path: Path, reason: object) -> ValueError:
    return ValueError(f"{path}: damaged, or not a file in {path.suffix} ({reason}). Fetch it again.")


def _keys(line: str | bytes) -> set[str]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return set()
    return set(content) if isinstance(content, dict) else set()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if its name ends in .gz or .zst."""
    if path.suffix == ".zst":
        with _pyarrow(path) as pyarrow, pyarrow.input_stream(path, compression="zstd") as stream:
            yield io.BufferedReader(stream, _BUFFER_BYTES)
        return
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from None
