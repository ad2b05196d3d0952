"""Conversations to text.

A conversation is laid out by a Jinja template: that of `inference.chat_template`, else the tokenizer's own. Without one
it is plain text, a message a line. A conversation's text is a function of its messages alone, so that each turn begins
with the turns before it and finds their cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import refuse
from .chat_template import ChatTemplate, NotATemplate

KEY = "inference.chat_template"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_REMEDY = "Correct it, or name another file with {}."

_MOST_BYTES = 2**20  # of a template's file
_MOST_CPU_S = 10.0  # of one conversation's layout: 10 MB take 0.1 s

Message = Mapping[str, Any]
"""role and content."""


@dataclass(frozen=True)
class Chat:
    """How conversations become text.

    Attributes:
        template: None for plain text, a message a line.
        variables: what the template is given besides the messages.
        stop_tokens, stop_texts: the template's end of a turn, where it is a single token, or where it is not.
    """

    template: ChatTemplate | None = None
    variables: Mapping[str, str] | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()

    def text(self, messages: Sequence[Message], reply: bool = True) -> str:
        """The conversation. reply: up to where the model goes on.

        Raises:
            ValueError: the template refuses the messages, or fails on them.
        """
        if self.template is None:
            return "".join(message["content"] + "\n" for message in messages)
        conversation = [dict(message) for message in messages]
        try:
            return self.template.render(
                {"messages": conversation, "add_generation_prompt": reply, **(self.variables or {})}
            )
        except ValueError as error:
            raise ValueError(f"messages: {error}") from None


def chat_of(path: str | None, tokenizer: Any, key: str = KEY) -> Chat:
    """The layout of a model's chats: by the template at `path`, else the tokenizer's, else plain. key: the user's name
    for `path`.

    Raises:
        ValueError: a template that cannot be read, is not Jinja, or cannot lay out a question.
    """
    source, where = template_of(tokenizer), "of the tokenizer"
    if path is not None:
        source, where = _read(path, key), path
    if source is None:
        return Chat()
    try:
        template = ChatTemplate(source, _MOST_CPU_S)
    except NotATemplate as error:
        raise refuse(key, where, f"a Jinja template ({error})", _REMEDY.format(key)) from None
    chat = Chat(template, special_tokens(tokenizer))
    try:
        chat.text([{"role": "user", "content": "question"}])
    except ValueError as error:
        raise refuse(key, where, f"a template that lays out a user's question ({error})", _REMEDY.format(key)) from None
    return _with_end(chat, tokenizer.tokenize)


def _read(path: str, key: str) -> str:
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise refuse(key, path, f"a file of at most {_MOST_BYTES:,} bytes", _REMEDY.format(key))
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise refuse(key, path, f"a file with a Jinja template ({reason})", _REMEDY.format(key)) from None


def _with_end(chat: Chat, encode: Callable[[str], Sequence[int]]) -> Chat:
    """The chat, with what its template writes behind an answer as an end of answers."""
    question, answer = "question", "the-answer"
    try:
        text = chat.text([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], reply=False)
    except ValueError:  # the template will say so again when such a conversation comes
        return chat
    end = text.rpartition(answer)[2].strip() if answer in text else ""
    if not end:
        return chat
    ids = tuple(encode(end))
    if len(ids) == 1:
        return Chat(chat.template, chat.variables, stop_tokens=ids)
    return Chat(chat.template, chat.variables, stop_texts=(end,))


def template_of(tokenizer: Any) -> str | None:
    """The Jinja chat template that came with the tokenizer; of several, the one called default."""
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """The texts of special tokens that chat templates name, empty where the tokenizer has none."""
    library = tokenizer._tokenizer
    texts = {name: getattr(library, name, None) for name in _NAMED_TOKENS}
    return {name: text if isinstance(text, str) else "" for name, text in texts.items()}
