"""Instruction data: conversations of a JSONL file as tokens, of which the answers are learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..mcore.corpus import Document
from ..models.chat import Chat

_MOST_REPLACED = 8  # tokens in which the text of first turns may end otherwise where more follows
_FORM = '{"messages": [{"role": "user", "content": "…"}, …]} or {"prompt": "…", "completion": "…"}, in UTF-8'


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
