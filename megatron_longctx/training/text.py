"""Datasets from text and conversations: the documents of a source, tokenized into Megatron's indexed format."""

from __future__ import annotations

import json
import logging
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from ..config import DataConfig
from ..core.errors import is_line, refuse, shown
from ..mcore.corpus import Corpus, write_corpus, write_documents, write_trees
from ..mcore.tokenizer import build_tokenizer
from .conversations import chat_of, conversations, with_shared_beginnings
from .rollouts import ROLLOUT_KEYS, Rollouts
from .text_files import (
    CONVERSATION_KEYS,
    ENDINGS,
    files_of,
    first_keys,
    is_jsonl,
    is_text,
    matching,
    parsed,
    read_text,
    refuse_empty,
)

logger = logging.getLogger(__name__)

_BUILT_IN = ("stdlib", "pydoc")
_SOURCES = f"`stdlib`, `pydoc`, a folder, or a file that ends in {ENDINGS}"
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Source:
    """The origin of a dataset's text.

    Attributes:
        name: `stdlib` (the sources of this Python's library), `pydoc` (the language reference that `help()` shows), a
            folder, or a file. Lines of JSONL files are documents, as are whole files of other text.
        glob: pattern of a folder's files; None for text and JSONL files that are not hidden, nor in hidden folders.
        joined: make one document of the files of each sub-folder, without tests.
    """

    name: str
    glob: str | None = None
    joined: bool = False

    def conversations(self) -> list[Path]:
        """Return the files if all are JSONL, and the first line is a conversation without `text`.

        Raises:
            ValueError: as `documents`.
        """
        keys, files = self._lines()
        return files if "text" not in keys and keys & CONVERSATION_KEYS else []

    def rollouts(self) -> list[Path]:
        """Return the files if all are JSONL, and the first line is a prompt with responses or children.

        Raises:
            ValueError: as `documents`.
        """
        keys, files = self._lines()
        return files if any(needed <= keys for needed in ROLLOUT_KEYS) else []

    def _lines(self) -> tuple[set[str], list[Path]]:
        """Return the keys of the first line and the files if all are JSONL."""
        files = [] if self.name in _BUILT_IN else self._files()
        if not files or not all(map(is_jsonl, files)):
            return set(), []
        return first_keys(next(file for file in files if file.stat().st_size)), files

    def documents(self) -> Iterator[list[str]]:
        """Return the texts of every document, in an order that depends only on names.

        Raises:
            ValueError: a source that is missing, empty or not text.
        """
        if self.name == "stdlib":
            root = Path(sysconfig.get_paths()["stdlib"])
            return _by_package(root, matching(root, "**/*.py"))
        if self.name == "pydoc":
            return ([text] for _, text in sorted(import_module("pydoc_data.topics").topics.items()))
        files = self._files()
        if not self.joined:
            return chain.from_iterable(map(_documents, files))
        return _by_package(Path(self.name), files)

    def _files(self) -> list[Path]:
        path = Path(self.name)
        if is_folder := bool(self.name) and path.is_dir():
            files = files_of(path, self.glob)
        elif path.is_file() and (is_jsonl(path) or is_text(path)):
            files = [path]
            refuse_empty(self.name, files)
        else:
            raise refuse("--source", self.name, _SOURCES, "Check the path, or name a folder and its files by --glob.")
        if self.joined and (not is_folder or any(map(is_jsonl, files))):
            expected = "a folder of text with --join; lines of JSONL are documents of their own"
            raise refuse("--source", self.name, expected, "Leave --join out.")
        return files


def prepare(
    source: Source,
    out: Path,
    library: str,
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    share_prefixes: int | None = None,
) -> Corpus:
    """Write `source` as a dataset: `.bin`, `.idx` and `.json`; for conversations also `.mask.bin` and `.mask.idx`.

    Args:
        out: path without suffix.
        library: a tokenizer library of Megatron-Core; its files are at `tokenizer_path`.
        chat_template: file of the template for conversations and prompts; None for the tokenizer's own.
        share_prefixes: the most tokens of a tree of conversations that begin alike; None writes each alone.

    Raises:
        ValueError: a missing or empty source, a JSONL line without text, a pattern that matches nothing or leaves the
            folder, an unusable tokenizer, conversations without a template.
    """
    if not out.name or out.name == ".." or not is_line(str(out)):
        raise refuse("--out", out, "a path that ends in a name of one line", "For example data/corpus.")
    may_be_name = library == "byte-level" or (library == "huggingface" and tokenizer_path)  # a model name on the hub
    if not may_be_name and not (tokenizer_path and Path(tokenizer_path).exists()):
        remedy = "Give their path, or use --tokenizer byte-level."
        raise ValueError(f"--tokenizer-path {tokenizer_path}: expected the files of a {library} tokenizer. {remedy}")
    tokenizer = build_tokenizer(library, tokenizer_path)
    progress = partial(tqdm, desc="tokenizing", unit=" documents", disable=not sys.stderr.isatty())
    if share_prefixes is not None and (share_prefixes < 1 or not source.conversations()):
        expected = f"a number of tokens from 1 on, and conversations to share; {source.name} has other documents"
        raise refuse("--share-prefixes", share_prefixes, expected, "Leave it out; rollouts share their prompts anyway.")
    if paths := source.rollouts():
        rollouts = Rollouts(paths, tokenizer.tokenize, tokenizer.eod, partial(chat_of, chat_template, tokenizer))
        if chat_template and rollouts.chat is None:
            expected = "none for rollouts whose prompts are no messages: their texts are tokenized as they are"
            raise refuse("--chat-template", chat_template, expected, "Leave it out.")
        corpus = write_trees(progress(rollouts.trees()), out, tokenizer, rollouts.columns, source.name)
    elif paths := source.conversations():
        chat = chat_of(chat_template, tokenizer)
        documents = chain.from_iterable(conversations(path, chat, tokenizer.tokenize) for path in paths)
        if share_prefixes is None:
            corpus = write_documents(progress(documents), out, tokenizer, masked=True)
        else:
            trees = with_shared_beginnings(progress(documents), share_prefixes)
            corpus = write_trees(trees, out, tokenizer, source=source.name)
    elif chat_template:
        expected = f"conversations to lay out; the first line of {source.name} is none"
        raise refuse("--chat-template", chat_template, expected, "Leave it out, or give a .jsonl file of `messages`.")
    else:
        corpus = write_corpus(progress(source.documents()), out, tokenizer)
    logger.info(
        "%s: %s documents, %s tokens%s (%s), the %s tokenizer",
        out, f"{corpus.documents:,}", f"{corpus.tokens:,}",
        "" if corpus.learned is None else f", {corpus.learned:,} of them answers", source.name, library,
    )  # fmt: skip
    return corpus


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


def _documents(path: Path) -> Iterator[list[str]]:
    """Yield the documents of a file: its lines, or its text unless it is empty."""
    if is_jsonl(path):
        yield from parsed(path, _line_text)
    elif text := read_text(path):
        yield [text]


def _line_text(line: bytes) -> list[str]:
    try:
        content = json.loads(line)
        if not isinstance(content, dict) or "text" in content:
            content["text"].encode()  # refuses half of a surrogate pair
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError('expected {"text": "…"} in UTF-8. Fix or remove the line.') from None
    if "text" not in content:
        others = "`messages`, or `prompt` and `completion`, from the first line on"
        keys = shown(", ".join(content) or "no key")
        raise ValueError(f"expected `text` (or {others}); it has {keys}. Rename the key.")
    if not content["text"]:
        raise ValueError("expected a text that is not empty. Fix or remove the line.")
    return [content["text"]]
