"""Datasets from text and conversations: the documents of a source, tokenized into Megatron's indexed format."""

from __future__ import annotations

import json
import logging
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from ..config import DataConfig
from ..errors import is_line, refuse, shown
from ..mcore.corpus import Corpus, Document, write_corpus, write_documents
from ..mcore.tokenizer import build_tokenizer
from ..models.chat import Chat, load_chat

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TEXT = (".md", ".py", ".rst", ".tex", ".txt")
_SOURCES = f"`stdlib`, `pydoc`, a folder, or a file that ends in .jsonl, {', '.join(_TEXT)}"
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# The most tokens at the end of a text that may change when more text follows.
_MAX_REPLACED = 8
_FORM = '{"messages": [{"role": "user", "content": "…"}, …]} or {"prompt": "…", "completion": "…"}, in UTF-8'


@dataclass(frozen=True)
class Source:
    """The origin of a dataset's text.

    Attributes:
        name: `stdlib` (the sources of this Python's library), `pydoc` (the language reference that `help()` shows), a
            folder, a text file or a `.jsonl` file.
        glob: pattern of a folder's files; None for text files that are not hidden, nor in hidden folders.
        joined: make one document of the files of each sub-folder, without tests.
    """

    name: str
    glob: str | None = None
    joined: bool = False

    @property
    def conversations(self) -> Path | None:
        """The file, if its first line is a conversation without `text`."""
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
        """Return the texts of every document, in an order that depends only on names.

        Raises:
            ValueError: a source that is missing, empty or not text.
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
            raise refuse("--source", self.name, _SOURCES, "Check the path, or name a folder and its files by --glob.")
        _refuse_empty(self.name, [path])
        return _parsed(path, _line_text) if path.suffix == ".jsonl" else iter([[_read(path)]])


def prepare(
    source: Source, out: Path, library: str, tokenizer_path: str | None = None, chat_template: str | None = None
) -> Corpus:
    """Write `source` as a dataset: `.bin`, `.idx` and `.json`; for conversations also `.mask.bin` and `.mask.idx`.

    Args:
        out: path without suffix.
        library: a tokenizer library of Megatron-Core; its files are at `tokenizer_path`.
        chat_template: file of the template for conversations; None for the tokenizer's own.

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
    if path := source.conversations:
        documents = conversations(path, _chat(chat_template, tokenizer), tokenizer.tokenize)
        corpus = write_documents(progress(documents), out, tokenizer, masked=True)
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


def _files(root: Path, glob: str | None) -> list[Path]:
    matching = _matching(root, "**/*" if glob is None else glob)
    if glob is None:
        visible = [path for path in matching if not any(part.startswith(".") for part in path.relative_to(root).parts)]
        matching = [path for path in visible if path.suffix in _TEXT]
        if not matching and visible:
            suffixes = Counter(path.suffix for path in visible).most_common(5)
            ends = ", ".join(name or "no ending" for name, _ in suffixes)
            expected = f"files that end in {', '.join(_TEXT)}; its {len(visible)} files have {ends}"
            raise refuse("--source", root, expected, "Choose others by --glob, for example --glob '**/*.html'.")
    if not matching:
        if glob is None:
            raise refuse("--source", root, "files in the folder; it has none", "Check the path.")
        raise refuse("--glob", glob, f"a pattern that files in {root} match; none does", "For example '**/*.txt'.")
    _refuse_empty(str(root), matching)
    return matching


def _matching(root: Path, glob: str) -> list[Path]:
    try:
        if ".." in Path(glob).parts:
            raise ValueError("it leads out of the folder")
        return [path for path in sorted(root.glob(glob)) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise refuse("--glob", glob, f"a pattern of paths inside {root} ({error})", "For example '**/*.txt'.") from None


def _refuse_empty(source: str, files: Sequence[Path]) -> None:
    if not any(file.stat().st_size for file in files):
        actual = "the file is empty" if len(files) == 1 else f"all {len(files)} files are empty"
        raise refuse("--source", source, f"text; {actual}", "Check what wrote it.")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


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
        yield [text for path in paths if (text := _read(path))]


def _parsed(path: Path, parse: Callable[[bytes], T]) -> Iterator[T]:
    """Yield the parsed lines of a file. Errors have the file and the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield parse(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


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


def _chat(template: str | None, tokenizer: Any) -> Chat:
    chat = load_chat(template, tokenizer, "--chat-template")
    if chat.template is None:
        expected = "a file: the lines are conversations, and this tokenizer has no chat template"
        raise refuse("--chat-template", None, expected, "Name a file with a Jinja template.")
    return chat


def conversations(path: Path, chat: Chat, encode: Callable[[str], Sequence[int]]) -> Iterator[Document]:
    """Return the tokens of every line's conversation, with a mask of the tokens to learn: the assistant's.

    A line has `messages`, or a `prompt` and its `completion`: texts, or lists of messages. Only answers in the
    completion are learned.

    Raises:
        ValueError: a line in another form or without an answer, or a template that does not lay it out turn by turn.
            The message has the file and the line.
    """
    return _parsed(path, lambda line: _tokens(*_messages(line), chat, encode))


def _messages(line: bytes) -> tuple[list[Mapping[str, Any]], int]:
    """Return the messages of a line, and how many of them are the prompt, which is not learned."""
    prompt: Sequence[Mapping[str, Any]] = []
    try:
        content = json.loads(line)
        json.dumps(content, ensure_ascii=False).encode()  # refuses half of a surrogate pair
        if "messages" in content:
            completion = content["messages"]
        else:
            prompt, completion = (
                [{"role": role, "content": part}] if isinstance(part, str) else part
                for role, part in (("user", content["prompt"]), ("assistant", content["completion"]))
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
    messages: Sequence[Mapping[str, Any]], prompt: int, chat: Chat, encode: Callable[[str], Sequence[int]]
) -> Document:
    """Return tokens and mask. An answer is what the template adds after the generation prompt, with the end of turn."""
    text = chat.text(messages, reply=False)
    ids = list(encode(text))
    learned = [False] * len(ids)
    for at, message in enumerate(messages):
        if message["role"] == "assistant" and at >= prompt:
            parts = (chat.text(messages[:at]), chat.text(messages[: at + 1], reply=False))
            if not (text.startswith(parts[1]) and parts[1].startswith(parts[0])):
                raise ValueError(
                    f"expected a chat template whose text of a conversation begins with that of its first turns; it "
                    f"does not at message {at + 1}. Use another template, or a line for each of its answers."
                )
            begin, end = (_num_shared(ids, list(encode(part))) for part in parts)
            learned[begin:end] = [True] * (end - begin)
    return ids, learned


def _num_shared(ids: Sequence[int], first: Sequence[int]) -> int:
    """Return how many tokens a conversation shares with its first turns. A token that spans their end is not shared."""
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, first, strict=False)))
    if len(first) - count > _MAX_REPLACED:
        raise ValueError(
            "expected a tokenizer whose tokens of the first turns do not depend on what follows. Use another tokenizer "
            "or another template."
        )
    return count
