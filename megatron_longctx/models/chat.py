"""Formats conversations as text.

A Jinja template formats a conversation: that of `inference.chat_template`, else the tokenizer's own. Without one, it is
plain text with one message per line. The text depends only on the conversation's messages, so every turn begins with
the previous turns, whose tokens are found in the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import files
from ..core.errors import refuse
from .chat_template import ChatTemplate, InvalidTemplate

KEY = "inference.chat_template"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_BYTES = 2**20  # of a template's file
_MAX_CPU_S = 10.0  # for one conversation: 10 MB take 0.1 s

ChatMessage = Mapping[str, Any]
"""A message, with `role` and `content`."""


@dataclass(frozen=True)
class Chat:
    """The format of conversations."""

    template: ChatTemplate | None = None  # None: plain text, with one message per line
    variables: Mapping[str, str] | None = None  # given to the template in addition to the messages
    stop_tokens: tuple[int, ...] = ()  # the end of a reply in the template, if it is a single token
    stop_texts: tuple[str, ...] = ()  # else as text

    def text(self, messages: Sequence[ChatMessage], reply: bool = True, tools: Sequence[Any] = ()) -> str:
        """Return the text of a conversation. Raises ValueError: the template refuses the messages, or fails on them.

        Args:
            reply: let it end where the model's reply begins.
            tools: offered to the model, for templates that have a format for them.
        """
        if self.template is None:
            return "".join(message["content"] + "\n" for message in messages)
        given = {"messages": [dict(message) for message in messages], "add_generation_prompt": reply}
        try:
            return self.template.render(
                {**given, **({"tools": list(tools)} if tools else {}), **(self.variables or {})}
            )
        except ValueError as error:
            raise ValueError(f"messages: {error}") from None


def load_chat(path: str | None, tokenizer: Any, key: str = KEY) -> Chat:
    """Return a model's chat format: by the template at `path`, else the tokenizer's, else plain text.

    Refuse a template that cannot be read, is not Jinja, or fails on a question; `key` is the user's name for `path`.
    """
    source, origin = (template_of(tokenizer), "of the tokenizer") if path is None else (_read(path, key), path)
    if source is None:
        return Chat()
    try:
        template = ChatTemplate(source, _MAX_CPU_S)
    except InvalidTemplate as error:
        raise refuse(key, origin, f"a Jinja template ({error})", _remedy(key)) from None
    chat = Chat(template, special_tokens(tokenizer))
    try:
        chat.text([{"role": "user", "content": "question"}])
    except ValueError as error:
        raise refuse(key, origin, f"a template that formats a user's question ({error})", _remedy(key)) from None
    if not (end := _end_of_reply(chat)):
        return chat
    ids = tuple(tokenizer.tokenize(end))
    return replace(chat, stop_tokens=ids) if len(ids) == 1 else replace(chat, stop_texts=(end,))


def _remedy(key: str) -> str:
    return f"Correct it, or name another file with {key}."


def _read(path: str, key: str) -> str:
    try:
        return files.read_bytes(Path(path), _MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise refuse(key, path, f"a file with a Jinja template ({reason})", _remedy(key)) from None


def _end_of_reply(chat: Chat) -> str:
    """Return the text that the template writes after a reply."""
    question, answer = "question", "the-answer"
    try:
        text = chat.text([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], reply=False)
    except ValueError:  # raised again when a user sends such a conversation
        return ""
    return text.rpartition(answer)[2].strip() if answer in text else ""


def template_of(tokenizer: Any) -> str | None:
    """Return the tokenizer's own Jinja chat template; if it has several, the one named default."""
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Return the texts of the special tokens that chat templates use, empty for those that the tokenizer lacks."""
    library = tokenizer._tokenizer
    texts = {name: getattr(library, name, None) for name in _SPECIAL_TOKENS}
    return {name: text if isinstance(text, str) else "" for name, text in texts.items()}
