"""Sources of a corpus: this Python's own library, a folder of files, or a JSONL file of texts or conversations."""

from __future__ import annotations

import json
import logging
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..config import DataConfig
from ..errors import is_line, refuse
from ..mcore.corpus import Corpus, write_corpus, write_documents
from ..mcore.tokenizer import build_tokenizer
from ..models.chat import Chat, chat_of
from .conversations import conversations

logger = logging.getLogger(__name__)

_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Chats:
    """How conversations are laid out: by the template at this path, or the tokenizer's own."""

    template: str | None = None


def prepare(
    source: str, out: Path, glob: str, library: str, tokenizer_path: str | None, chats: Chats | None = None
) -> Corpus:
    """Write the corpus of `source` to `out` (`.bin`, `.idx`, `.json`).

    Args:
        source: `stdlib`, a folder, or a `.jsonl` file with a `text` in each line.
        glob: which files of a folder.
        library: a tokenizer of Megatron-Core; `tokenizer_path` its files.
        chats: the source is a `.jsonl` file of conversations instead.

    Raises:
        ValueError: a source that is not there or has no text, a JSONL line without text, a pattern that is none or
            leads out of the folder, an unusable tokenizer.
    """
    if not out.name or out.name == ".." or not is_line(str(out)):
        raise refuse("--out", out, "a path that ends in a name of one line", "For example data/corpus.")
    named = library == "byte-level" or (library == "huggingface" and tokenizer_path)  # may be a name at their hub
    if not named and not (tokenizer_path and Path(tokenizer_path).exists()):
        remedy = "Give their path, or use --tokenizer byte-level."
        raise ValueError(f"--tokenizer-path {tokenizer_path}: expected the files of a {library} tokenizer. {remedy}")
    tokenizer = build_tokenizer(library, tokenizer_path)
    shown = partial(tqdm, desc="tokenizing", unit=" documents", disable=not sys.stderr.isatty())
    if chats is None:
        corpus = write_corpus(shown(_documents(source, glob)), out, tokenizer)
    else:
        found = conversations(_jsonl(source), _layout(chats, tokenizer), tokenizer.tokenize)
        corpus = write_documents(shown(found), out, tokenizer, masked=True)
    logger.info(
        "%s: %s documents, %s tokens%s (%s), the %s tokenizer",
        out, f"{corpus.documents:,}", f"{corpus.tokens:,}",
        "" if corpus.learned is None else f", {corpus.learned:,} of them answers", source, library,
    )  # fmt: skip
    return corpus


def prepare_missing(data: DataConfig) -> None:
    """Write the sources of this Python's library as every dataset that is not there: of demos and measurements."""
    for prefix in (prefix for _, prefix in data.datasets if not Path(f"{prefix}.bin").is_file()):
        logger.info("%s is not there: it is made of the sources of Python's standard library", prefix)
        prepare("stdlib", Path(prefix), "", data.tokenizer, data.tokenizer_path)


def _jsonl(source: str) -> Path:
    path = Path(source)
    if not (path.is_file() and path.suffix == ".jsonl"):
        raise refuse("--source", source, "a .jsonl file of conversations with --chat", "Check the path.")
    return path


def _layout(chats: Chats, tokenizer: Any) -> Chat:
    chat = chat_of(chats.template, tokenizer, "--chat-template")
    if chat.template is None:
        raise refuse(
            "--chat-template", None, "a file: this tokenizer has no chat template", "Name one of Jinja's form."
        )
    return chat


def _documents(source: str, glob: str) -> Iterator[list[str]]:
    if source == "stdlib":
        return _by_package(Path(sysconfig.get_paths()["stdlib"]), "**/*.py")
    path = Path(source)
    if source and path.is_dir():
        return _by_package(path, glob)
    if path.is_file() and path.suffix == ".jsonl":
        return _lines(path)
    raise refuse("--source", source, "`stdlib`, a folder or a .jsonl file", "Check the path.")


def _by_package(root: Path, glob: str) -> Iterator[list[str]]:
    """One document for each package (top-level folder or file): its files in order, each a text of its own."""
    packages: dict[str, list[Path]] = {}
    try:
        if ".." in Path(glob).parts:
            raise ValueError("it leads out of the folder")
        found = sorted(root.glob(glob))
    except (ValueError, NotImplementedError) as error:
        raise refuse("--glob", glob, f"a pattern of paths inside {root} ({error})", "For example '**/*.txt'.") from None
    for path in found:
        inside = path.relative_to(root)
        if path.is_file() and not _SKIP.intersection(inside.parts):
            packages.setdefault(inside.parts[0], []).append(path)
    for paths in packages.values():
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
        yield [text for text in texts if text]


def _lines(path: Path) -> Iterator[list[str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError
                text.encode()  # which half a pair of surrogates cannot be
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(
                    f'{path}:{number}: expected {{"text": "…"}} in UTF-8. Fix or remove the line.'
                ) from None
            if not text:
                raise ValueError(f"{path}:{number}: expected a text that is not empty. Fix or remove the line.")
            yield [text]
