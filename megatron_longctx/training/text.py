"""Datasets from text and conversations: the documents of a source, tokenized into Megatron's indexed format."""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from glob import has_magic
from itertools import chain
from pathlib import Path
from typing import Any

from ..config import DataConfig
from ..config.progress import Progress
from ..core.errors import is_line, refuse
from ..mcore.corpus import Corpus, write_corpus, write_trees
from ..mcore.tokenizer import build_tokenizer, encoder
from .conversations import ROLLOUT_KEYS, Rollouts, chat_of, conversations, with_shared_beginnings
from .shards import Recipe, write_sharded
from .text_files import (
    CONVERSATION_KEYS,
    ENDINGS,
    files_of,
    first_keys,
    has_rows,
    is_jsonl,
    is_text,
    matching,
    read_text,
    refuse_empty,
)

logger = logging.getLogger(__name__)

_SOURCES = f"`stdlib`, a folder, a pattern, or a file that ends in {ENDINGS}"
_MAX_WORKERS = 16  # by default: each has a tokenizer in memory
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


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


def prepare(
    source: Source,
    out: Path,
    library: str,
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    share_prefixes: int | None = None,
    workers: int | None = None,
) -> Corpus:
    """Write `source` as a dataset: `.bin`, `.idx` and `.json`; for conversations also `.mask.bin` and `.mask.idx`.

    Args:
        out: path without suffix.
        library: a tokenizer library of Megatron-Core; its files are at `tokenizer_path`.
        chat_template: file of the template for conversations and prompts; None for the tokenizer's own.
        share_prefixes: the most tokens of a tree of conversations that begin alike; None writes each alone.
        workers: processes that tokenize; None for one per core, up to 16. The result does not depend on it.

    Raises:
        ValueError: a source, a line, a tokenizer or an option that cannot be used.
        JobFailed: a process was killed.
    """
    tokenizer = check(source, out, library, tokenizer_path, chat_template, share_prefixes, workers)
    encode, documents, is_trees = encoder(tokenizer), source.documents(), source.kind == "rollouts"
    is_chat = source.kind == "conversations"
    together = bool(is_trees or documents or share_prefixes)
    with Progress("tokenizing", unit="documents", told=together) as progress:
        if is_trees:
            rollouts = Rollouts(source.files, encode, tokenizer.eod, partial(chat_of, chat_template, tokenizer))
            if chat_template and rollouts.chat is None:
                expected = "none for rollouts whose prompts are no messages: their texts are tokenized as they are"
                raise refuse("--chat-template", chat_template, expected, "Leave it out.")
            corpus = write_trees(progress.each(rollouts.trees()), out, tokenizer, rollouts.columns, str(source))
        elif documents is not None:
            corpus = write_corpus(progress.each(documents), out, tokenizer)
        elif share_prefixes is not None:
            chat = chat_of(chat_template, tokenizer)
            talks = chain.from_iterable(conversations(path, chat, encode) for path in source.files)
            trees = with_shared_beginnings(progress.each(talks), share_prefixes)
            corpus = write_trees(trees, out, tokenizer, source=str(source))
        else:
            recipe = Recipe(library, tokenizer_path, is_chat, chat_template, source.text_key or "text")
            workers = workers or min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
            corpus = write_sharded(source.files, recipe, tokenizer, out, workers)
    logger.info(
        "%s: %s documents, %s tokens%s (%s), the %s tokenizer",
        out, f"{corpus.documents:,}", f"{corpus.tokens:,}",
        "" if corpus.learned is None else f", {corpus.learned:,} of them answers", source, library,
    )  # fmt: skip
    return corpus


def check(
    source: Source,
    out: Path,
    library: str,
    tokenizer_path: str | None,
    chat_template: str | None,
    share_prefixes: int | None,
    workers: int | None,
) -> Any:
    """Refuse what `prepare` refuses before it reads documents beyond the first. Return the tokenizer."""
    if not out.name or out.name == ".." or not is_line(str(out)):
        raise refuse("--out", out, "a path that ends in a name of one line", "For example data/corpus.")
    if library == "byte-level" and tokenizer_path:
        expected = "none with the byte-level tokenizer, which has no files"
        raise refuse("--tokenizer-path", tokenizer_path, expected, "Set --tokenizer=huggingface, say, or leave it out.")
    may_be_name = library == "byte-level" or (library == "huggingface" and tokenizer_path)  # a model name on the hub
    if not may_be_name and not (tokenizer_path and Path(tokenizer_path).exists()):
        remedy = "Give their path, or use --tokenizer byte-level."
        raise ValueError(f"--tokenizer-path {tokenizer_path}: expected the files of a {library} tokenizer. {remedy}")
    tokenizer, is_chat = build_tokenizer(library, tokenizer_path), source.kind == "conversations"
    together = source.kind == "rollouts" or source.joined or not source.has_files or bool(share_prefixes)
    if share_prefixes is not None and (share_prefixes < 1 or not is_chat):
        expected = f"a number of tokens from 1 on, and conversations to share; {source} has other documents"
        raise refuse("--share-prefixes", share_prefixes, expected, "Leave it out; rollouts share their prompts anyway.")
    if chat_template and not is_chat and source.kind != "rollouts":
        expected = f"conversations to lay out; the first line of {source} is none"
        raise refuse("--chat-template", chat_template, expected, "Leave it out, or give a .jsonl file of `messages`.")
    if source.glob and not any(Path(name).is_dir() for name in (source.name, *source.more)):
        raise refuse("--glob", source.glob, f"a folder in {source} to choose files of", "Name one, or leave it out.")
    if source.text_key and not (source.has_files and any(map(has_rows, source.files))):
        raise refuse("--text-key", source.text_key, "lines or rows that have keys", "Leave it out: this is plain text.")
    if workers is not None and (workers < 1 or (together and workers > 1)):
        expected = "1 for these documents, which are made together" if together else "1 or more"
        raise refuse("--workers", workers, expected, "Leave it out.")
    if is_chat:
        chat_of(chat_template, tokenizer)
    return tokenizer


def prepare_missing(data: DataConfig) -> None:
    """Write the sources of Python's library as every missing dataset, for demos and measurements."""
    for prefix in (prefix for _, prefix in data.datasets if not Path(f"{prefix}.bin").is_file()):
        logger.info("%s is missing: it is made of the sources of Python's standard library", prefix)
        prepare(Source("stdlib"), Path(prefix), data.tokenizer, data.tokenizer_path)


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
