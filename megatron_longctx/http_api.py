"""The OpenAI-compatible HTTP interface: requests checked and answered, on the standard library's server.

It knows text, tokens and JSON; an inbox takes requests and brings back events (`serve.Inbox`).
"""

from __future__ import annotations

import hmac
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn, Protocol

from .inference.sampling import Sampling
from .inference.scheduler import Event

logger = logging.getLogger(__name__)

_READ_TIMEOUT_S = 30.0
_MOST_STOPS = 16
# What would change the answer, and the values that change nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
}


class Inbox(Protocol):
    """Where requests go and events come from."""

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> tuple[int, queue.Queue[Event]] | None: ...

    def cancel(self, number: int) -> None: ...


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class ApiLimits:
    """max_connections: served at once; more are answered 503. default_tokens: where a request does not say."""

    max_body_bytes: int
    max_connections: int
    default_tokens: int


@dataclass(frozen=True)
class Api:
    """What the interface serves. key: what clients have to show; None for nothing."""

    name: str
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    stop_token: int
    inbox: Inbox
    limits: ApiLimits
    key: str | None = None


class Server(ThreadingHTTPServer):
    """A thread for every connection, up to the limit."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], api: Api) -> None:
        self.api = api
        self._free = threading.BoundedSemaphore(api.limits.max_connections)
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.info("connection from %s ended", client_address[0], exc_info=logger.isEnabledFor(logging.DEBUG))


class TextStream:
    """Tokens to text as they come: whole characters only, and nothing from a stop text on."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._hold = max((len(stop) - 1 for stop in stops), default=0)
        self._ids: list[int] = []
        self._shown = 0
        self.stopped = False

    def feed(self, token: int) -> str:
        """What can be shown now."""
        self._ids.append(token)
        text = self._decode(self._ids).rstrip("\ufffd")
        found = [at for stop in self._stops if (at := text.find(stop, max(0, self._shown - self._hold))) >= 0]
        self.stopped = bool(found)
        return self._show(text[: min(found)] if found else text[: max(self._shown, len(text) - self._hold)])

    def finish(self) -> str:
        """What was held back, at the end."""
        return "" if self.stopped else self._show(self._decode(self._ids))

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new


@dataclass(frozen=True)
class Asked:
    """A checked request."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    usage: bool  # at the end of a stream
    chat: bool


def checked(api: Api, body: Any, chat: bool) -> Asked:
    """What a request's JSON asks for.

    Raises:
        ApiError: it cannot be served.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object; send one with model and prompt or messages")
    if body.get("model", api.name) != api.name:
        raise ApiError(404, f"model={body['model']!r} is not served here; the model is {api.name!r}", "not_found_error")
    for key, harmless in _UNSUPPORTED.items():
        if body.get(key) is not None and body[key] not in harmless:
            raise ApiError(400, f"{key} is not supported; leave it out")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not (isinstance(stops, list) and len(stops) <= _MOST_STOPS and all(isinstance(s, str) and s for s in stops)):
        raise ApiError(400, f"stop: expected a text or up to {_MOST_STOPS} texts")
    most = _number(body, "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens", int)
    try:
        sampling = Sampling(
            max_new_tokens=api.limits.default_tokens if most is None else int(most),
            temperature=float(_number(body, "temperature", float, 1.0)),
            top_k=_number(body, "top_k", int),
            top_p=float(_number(body, "top_p", float, 1.0)),
            seed=int(_number(body, "seed", int, time.time_ns())),
            stop=(api.stop_token,),
        )
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    options = body.get("stream_options") or {}
    return Asked(
        prompt=tuple(_messages(api, body) if chat else _prompt(api, body)),
        sampling=sampling,
        stops=tuple(stops),
        stream=body.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        chat=chat,
    )


def _number(body: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise ApiError(400, f"{key}={value!r}: expected {'a number' if kind is float else 'an integer'}")
    return value


def _prompt(api: Api, body: Mapping[str, Any]) -> Sequence[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompt = list(api.encode(prompt))
    if isinstance(prompt, list) and prompt and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        return prompt
    raise ApiError(400, "prompt: expected a text that is not empty, or a list of token ids")


def _messages(api: Api, body: Mapping[str, Any]) -> Sequence[int]:
    """A chat as plain text, one message a line: models trained here know no roles."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: expected a list of messages with role and content")
    texts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            texts_of = [part for part in parts if isinstance(part, str)]
            content = "".join(texts_of) if len(texts_of) == len(content) else None
        if not isinstance(content, str):
            raise ApiError(400, "messages: expected the content of every message to be text")
        texts.append(content + "\n")
    return list(api.encode("".join(texts)))


@dataclass
class Answer:
    """A request under way: pieces of text, then how it ended."""

    api: Api
    asked: Asked
    number: int
    events: queue.Queue[Event]
    finish_reason: str = ""
    num_tokens: int = 0
    cached_tokens: int = 0

    def first(self) -> Event:
        """Wait for the first event.

        Raises:
            ApiError: the request was refused, or failed.
        """
        event = self.events.get()
        self._raise_for(event)
        return event

    def pieces(self, event: Event) -> Iterator[str]:
        """The text, from the first event on.

        Raises:
            ApiError: it failed on the way.
        """
        text = TextStream(self.api.decode, self.asked.stops)
        while True:
            self._raise_for(event)
            self.cached_tokens = event.cached_tokens
            if event.token is not None:
                self.num_tokens += 1
                yield text.feed(event.token)
            if text.stopped:
                self.api.inbox.cancel(self.number)
                self.finish_reason = "stop"
                return
            if event.finish_reason is not None:
                self.finish_reason = event.finish_reason
                yield text.finish()
                return
            event = self.events.get()

    @property
    def usage(self) -> dict[str, Any]:
        prompt = len(self.asked.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def chunk(self, text: str | None, final: bool = False) -> dict[str, Any]:
        """A part of a stream, its end where there is no text; the whole answer where `final`."""
        chat = self.asked.chat
        reason = self.finish_reason if final or text is None else None
        if chat and final:
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        elif chat:
            said = {"delta": {"role": "assistant", "content": text} if text is not None else {}}
        else:
            said = {"text": text or ""}
        name = "chat.completion" if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.number}",
            "object": name + (".chunk" if chat and not final else ""),
            "created": int(time.time()),
            "model": self.api.name,
            "choices": [{"index": 0, **said, "finish_reason": reason, "logprobs": None}],
        }

    @staticmethod
    def _raise_for(event: Event) -> None:
        if event.finish_reason == "error":
            raise ApiError(400, event.error) if event.refused else ApiError(500, event.error, "server_error")


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "megatron-longctx"
    sys_version = ""
    timeout = _READ_TIMEOUT_S
    server: Server

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Answer errors in the form that clients of this interface know."""
        self._started = False
        try:
            self._authorize()
            work()
        except ApiError as error:
            body = {"error": {"message": str(error), "type": error.kind, "code": error.status}}
            if self._started:  # a stream's status is out already
                self._event(body)
                self.close_connection = True
            else:
                self.close_connection = True  # the body may not have been read
                self._json(error.status, body)

    def _authorize(self) -> None:
        key = self.server.api.key
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(shown.encode("latin-1"), key.encode()):
            raise ApiError(401, "missing or wrong API key: send Authorization: Bearer KEY", "authentication_error")

    def _get(self) -> None:
        if self.path not in ("/v1/models", f"/v1/models/{self.server.api.name}"):
            self._unknown()
        model = {"id": self.server.api.name, "object": "model", "created": 0, "owned_by": "megatron-longctx"}
        self._json(200, {"object": "list", "data": [model]} if self.path == "/v1/models" else model)

    def _post(self) -> None:
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._unknown()
        api = self.server.api
        asked = checked(api, self._body(), self.path == "/v1/chat/completions")
        submitted = api.inbox.submit(asked.prompt, asked.sampling)
        if submitted is None:
            raise ApiError(429, "too many requests wait already: try again later", "rate_limit_error")
        answer = Answer(api, asked, *submitted)
        first = answer.first()
        if not asked.stream:
            text = "".join(answer.pieces(first))
            self._json(200, answer.chunk(text, final=True) | {"usage": answer.usage})
            return
        try:
            self._stream(answer, first)
        except OSError:  # the client has gone
            api.inbox.cancel(answer.number)
            self.close_connection = True

    def _stream(self, answer: Answer, first: Event) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        self._started = True
        for text in answer.pieces(first):
            if text:
                self._event(answer.chunk(text))
        self._event(answer.chunk(None))
        if answer.asked.usage:
            self._event(answer.chunk(None) | {"choices": [], "usage": answer.usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, body: Mapping[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise ApiError(411, "Content-Length is missing: send the body's size")
        most = self.server.api.limits.max_body_bytes
        if int(length) > most:
            raise ApiError(413, f"the body has {length} bytes: expected at most {most}")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None

    def _json(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _unknown(self) -> NoReturn:
        raise ApiError(404, f"{self.command} {self.path} is not served here", "not_found_error")
