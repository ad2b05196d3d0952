"""Datasets of text: a source's documents as tokens, in Megatron's indexed form."""

from __future__ import annotations

import logging
import sys
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
from .sources import Source

logger = logging.getLogger(__name__)


def prepare(
    source: Source, out: Path, library: str, tokenizer_path: str | None = None, chat_template: str | None = None
) -> Corpus:
    """Write the corpus of `source` to `out` (`.bin`, `.idx`, `.json`; with conversations `.mask.bin`, `.mask.idx`).

    Args:
        library: a tokenizer of Megatron-Core; `tokenizer_path` its files.
        chat_template: a file that lays conversations out; None: the tokenizer's own.

    Raises:
        ValueError: a source that is not there or has no text, a JSONL line without text, a pattern that is none or
            leads out of the folder, an unusable tokenizer, conversations without a template.
    """
    if not out.name or out.name == ".." or not is_line(str(out)):
        raise refuse("--out", out, "a path that ends in a name of one line", "For example data/corpus.")
    named = library == "byte-level" or (library == "huggingface" and tokenizer_path)  # may be a name at their hub
    if not named and not (tokenizer_path and Path(tokenizer_path).exists()):
        remedy = "Give their path, or use --tokenizer byte-level."
        raise ValueError(f"--tokenizer-path {tokenizer_path}: expected the files of a {library} tokenizer. {remedy}")
    tokenizer = build_tokenizer(library, tokenizer_path)
    shown = partial(tqdm, desc="tokenizing", unit=" documents", disable=not sys.stderr.isatty())
    if chats := source.conversations:
        found = conversations(chats, _layout(chat_template, tokenizer), tokenizer.tokenize)
        corpus = write_documents(shown(found), out, tokenizer, masked=True)
    elif chat_template:
        expected = f"conversations to lay out; the first line of {source.name} is none"
        raise refuse("--chat-template", chat_template, expected, "Leave it out, or give a .jsonl file of `messages`.")
    else:
        corpus = write_corpus(shown(source.documents()), out, tokenizer)
    logger.info(
        "%s: %s documents, %s tokens%s (%s), the %s tokenizer",
        out, f"{corpus.documents:,}", f"{corpus.tokens:,}",
        "" if corpus.learned is None else f", {corpus.learned:,} of them answers", source.name, library,
    )  # fmt: skip
    return corpus


def prepare_missing(data: DataConfig) -> None:
    """Write the sources of this Python's library as every dataset that is not there: of demos and measurements."""
    for prefix in (prefix for _, prefix in data.datasets if not Path(f"{prefix}.bin").is_file()):
        logger.info("%s is not there: it is made of the sources of Python's standard library", prefix)
        prepare(Source("stdlib"), Path(prefix), data.tokenizer, data.tokenizer_path)


def _layout(template: str | None, tokenizer: Any) -> Chat:
    chat = chat_of(template, tokenizer, "--chat-template")
    if chat.template is None:
        expected = "a file: the lines are conversations, and this tokenizer has no chat template"
        raise refuse("--chat-template", None, expected, "Name one of Jinja's form.")
    return chat
