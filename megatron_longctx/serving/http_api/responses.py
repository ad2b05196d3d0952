"""Events of a request put into the interface's words."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ...inference.scheduler import Event
from ..text_stream import TextStream
from .parsing import ApiError, Asked, Model


@dataclass
class Answer:
    """A request under way.

    Attributes:
        running: the ranks still work on it.
        finish_reason: how it ended, None while it goes on.
    """

    model: Model
    asked: Asked
    number: int
    running: bool = True
    finish_reason: str | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._text = TextStream(self.model.decode, self.asked.stops)
        self._begun = False

    def take(self, event: Event) -> str:
        """The text that this event adds, empty for none.

        Raises:
            ApiError: the request was refused, or failed, or was ended by the server.
        """
        self.running = event.finish_reason is None
        if event.finish_reason == "cancelled":
            raise ApiError(503, event.error, "server_error")
        if event.finish_reason == "error":
            raise ApiError(400, event.error) if event.refused else ApiError(500, event.error, "server_error")
        self.cached_tokens = event.cached_tokens
        said = ""
        if event.token is not None:
            self.num_tokens += 1
            said = self._text.feed(event.token)
        if event.finish_reason is not None:
            said += self._text.finish()
        self.finish_reason = "stop" if self._text.stopped else event.finish_reason
        return said

    @property
    def usage(self) -> dict[str, Any]:
        prompt = len(self.asked.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def whole(self, text: str) -> dict[str, Any]:
        """The answer in one piece."""
        said = {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
        return self._body(said, self.finish_reason, ended=True) | {"usage": self.usage}

    def piece(self, text: str) -> dict[str, Any]:
        """A part of a stream."""
        if not self.asked.chat:
            return self._body({"text": text}, None)
        return self._body({"delta": self._role() | {"content": text}}, None)

    def end(self) -> list[dict[str, Any]]:
        """The last parts of a stream."""
        parts = [self._body({"delta": self._role()} if self.asked.chat else {"text": ""}, self.finish_reason)]
        if self.asked.usage:
            parts.append(parts[0] | {"choices": [], "usage": self.usage})
        return parts

    def _role(self) -> dict[str, str]:
        """Who speaks, the first time."""
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return role

    def _body(self, said: dict[str, Any], reason: str | None, ended: bool = False) -> dict[str, Any]:
        chat = self.asked.chat
        name = "chat.completion" if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.number}",
            "object": name + (".chunk" if chat and not ended else ""),
            "created": self.created,
            "model": self.model.name,
            "choices": [{"index": 0, **said, "finish_reason": reason, "logprobs": None}],
        }
