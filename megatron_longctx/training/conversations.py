"""Conversations as tokens, with a mask of the tokens to learn: the assistant's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import refuse
from ..mcore.corpus import Document
from ..models.chat import Chat, load_chat
from .text_files import parsed

# The most tokens at the end of a text that may change when more text follows.
_MAX_REPLACED = 8
_FORM = '{"messages": [{"role": "user", "content": "…"}, …]} or {"prompt": "…", "completion": "…"}, in UTF-8'


def chat_of(template: str | None, tokenizer: Any) -> Chat:
    """Return the template of the file, or the tokenizer's own.

    Raises:
        ValueError: there is none, or it cannot be used.
    """
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
    return parsed(path, lambda line: _tokens(*_messages(line), chat, encode))


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
