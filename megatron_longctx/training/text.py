"""Datasets of text and of conversations: a source's documents as tokens, in Megatron's indexed form."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..config import DataConfig
from ..errors import is_line, refuse
from ..mcore.corpus import Corpus, Document, write_corpus, write_documents
from ..mcore.tokenizer import build_tokenizer
from ..models.chat import Chat, chat_of
from .sources import Source

logger = logging.getLogger(__name__)

_MOST_REPLACED = 8  # tokens in which the text of first turns may end otherwise where more follows
_FORM = '{"messages": [{"role": "user", "content": "…"}, …]} or {"prompt": "…", "completion": "…"}, in UTF-8'


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


def conversations(path: Path, chat: Chat, encode: Callable[[str], Sequence[int]]) -> Iterator[Document]:
    """The tokens of every line's conversation, and which of them the assistant says.

    A line has `messages`, or a `prompt` and its `completion`: texts, or lists of messages, of which the answers in the
    completion alone are learned.

    Raises:
        ValueError: a line that is none of these, has no answer, or that the template does not lay out turn by turn;
            names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _tokens(*_messages(line), chat, encode)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def _messages(line: bytes) -> tuple[list[Mapping[str, Any]], int]:
    """The messages of a line, and how many of them are not learned whoever says them."""
    prompt: Sequence[Mapping[str, Any]] = []
    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()  # which half a pair of surrogates cannot be
        if "messages" in found:
            completion = found["messages"]
        else:
            prompt, completion = (
                [{"role": role, "content": said}] if isinstance(said, str) else said
                for role, said in (("user", found["prompt"]), ("assistant", found["completion"]))
            )
        messages = [*prompt, *completion]
        if not all(isinstance(message["role"], str) for message in messages):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"expected {_FORM}. Fix or remove the line.") from None
    if not any(message["role"] == "assistant" and message.get("content") != "" for message in completion):
        raise ValueError("expected an answer of role `assistant` that is not empty. Fix or remove the line.")
    return messages, len(prompt)


def _tokens(
    messages: Sequence[Mapping[str, Any]], given: int, chat: Chat, encode: Callable[[str], Sequence[int]]
) -> Document:
    """An answer is what the template adds to where the model goes on, the end of its turn included."""
    text = chat.text(messages, reply=False)
    ids = list(encode(text))
    learned = [False] * len(ids)
    for at, message in enumerate(messages):
        if message["role"] == "assistant" and at >= given:
            parts = (chat.text(messages[:at]), chat.text(messages[: at + 1], reply=False))
            if not (text.startswith(parts[1]) and parts[1].startswith(parts[0])):
                raise ValueError(
                    f"expected a chat template whose text of a conversation begins with that of its first turns; it "
                    f"does not at message {at + 1}. Use another template, or a line for each of its answers."
                )
            begin, end = (_shared(ids, list(encode(part))) for part in parts)
            learned[begin:end] = [True] * (end - begin)
    return ids, learned


def _shared(ids: Sequence[int], first: Sequence[int]) -> int:
    """How many tokens of a conversation are those of its first turns: one that spans their end is none of them."""
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, first, strict=False)))
    if len(first) - count > _MOST_REPLACED:
        raise ValueError(
            "expected a tokenizer that gives first turns the same tokens whatever follows. Use another of them, or "
            "another template."
        )
    return count
