"""Formatting of a request's events as answers of the interface."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ...inference.scheduler import Event
from ..text_stream import TextStream
from .parsing import ApiError, Model, ParsedRequest


@dataclass
class Answer:
    """The answer to a request in progress.

    Attributes:
        running: whether the ranks still work on it.
        finish_reason: None while it runs.
    """

    model: Model
    request: ParsedRequest
    number: int
    running: bool = True
    finish_reason: str | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._text = TextStream(self.model.decode, self.request.stops)
        self._begun = False

    def add(self, event: Event) -> str:
        """Add an event and return the text that it completes.

        Raises:
            ApiError: the request was refused, has failed, or was ended by the server.
        """
        self.running = event.finish_reason is None
        if event.finish_reason == "cancelled":
            raise ApiError(503, event.error, "server_error")
        if event.finish_reason == "error":
            raise ApiError(400, event.error) if event.refused else ApiError(500, event.error, "server_error")
        self.cached_tokens = event.cached_tokens
        text = ""
        if event.token is not None:
            self.num_tokens += 1
            text = self._text.feed(event.token)
        if event.finish_reason is not None:
            text += self._text.finish()
        self.finish_reason = "stop" if self._text.stopped else event.finish_reason
        return text

    @property
    def usage(self) -> dict[str, Any]:
        prompt = len(self.request.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def whole(self, text: str) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choice = {"message": {"role": "assistant", "content": text}} if self.request.chat else {"text": text}
        return self._body(choice, self.finish_reason, whole=True) | {"usage": self.usage}

    def chunk(self, text: str) -> dict[str, Any]:
        """Return a chunk of a stream."""
        if not self.request.chat:
            return self._body({"text": text}, None)
        return self._body({"delta": self._role() | {"content": text}}, None)

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks that end a stream."""
        chunks = [self._body({"delta": self._role()} if self.request.chat else {"text": ""}, self.finish_reason)]
        if self.request.usage:
            chunks.append(chunks[0] | {"choices": [], "usage": self.usage})
        return chunks

    def _role(self) -> dict[str, str]:
        """Return the role for the first chunk only."""
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return role

    def _body(self, choice: dict[str, Any], reason: str | None, whole: bool = False) -> dict[str, Any]:
        chat = self.request.chat
        name = "chat.completion" if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.number}",
            "object": name + (".chunk" if chat and not whole else ""),
            "created": self.created,
            "model": self.model.name,
            "choices": [{"index": 0, **choice, "finish_reason": reason, "logprobs": None}],
        }
