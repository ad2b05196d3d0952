"""The routes, on Starlette. Requests go to an outbox, which brings back their events."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ... import __version__
from ...inference.scheduler import Event
from .access import Access
from .inbox import Outbox
from .metrics import Metrics
from .options import ApiError, printable
from .parsing import Model, ParsedRequest, parse_request
from .responses import Answer

logger = logging.getLogger(__name__)

_ID = re.compile(r"[\w.:+-]{1,128}", re.ASCII)
_KEEP_ALIVE, _KEEP_ALIVE_S = b": keep-alive\n\n", 10.0  # a comment in a stream without tokens for so long
_RETRY_AFTER_S = 1
_LONG = 2**16  # bytes of a body; longer ones are parsed one at a time

_CORS: dict[str, Any] = {
    "allow_methods": ("GET", "POST"),
    "allow_headers": ("Authorization", "Content-Type", "X-Request-Id"),
    "expose_headers": ("X-Request-Id",),
}

_T = TypeVar("_T")
_Events = asyncio.Queue[list[Event]]  # those of a round


@dataclass
class Api:
    """The interface's routes and what they need."""

    model: Model
    outbox: Outbox
    max_body_bytes: int
    timeout_s: float  # the time limit for sending a body
    access: Access = field(default_factory=Access)
    origins: Sequence[str] = ()  # of web pages that may call the server
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self._parsing_long = asyncio.Lock()
        self._about = {"id": self.model.name, "object": "model", "created": 0, "owned_by": "megatron-longctx"}
        self._about["max_model_len"] = self.model.limits.together

    def application(self) -> Starlette:
        """Build the interface: `/v1`, which requires a key if there are any, and what operators ask."""
        v1 = [
            Route("/models", self._models),
            Route("/models/{name:path}", self._one_model),
            Route("/completions", partial(self._complete, chat=False), methods=["POST"]),
            Route("/chat/completions", partial(self._complete, chat=True), methods=["POST"]),
        ]
        return Starlette(
            routes=[
                Route("/health", self._live),
                Route("/ready", self._ready),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Mount("/v1", routes=v1, middleware=[Middleware(_RequireKey, access=self.access)]),
            ],
            middleware=[
                Middleware(_Observed, metrics=self.metrics),
                Middleware(_RequireHost, access=self.access),
                *([Middleware(CORSMiddleware, allow_origins=self.origins, **_CORS)] if self.origins else []),
            ],
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _not_found,
                ClientDisconnect: _disconnected,
                Exception: _internal_error,
            },
        )

    async def _live(self, request: Request) -> Response:
        """Tell that the process need not be restarted: if ranks hang, it ends by itself."""
        return _json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Tell whether new requests are accepted."""
        status = "stopping" if self.outbox.stopping else "stalled" if self.outbox.stalled else "ok"
        return _json({"status": status, "requests": self.outbox.num_requests}, 200 if status == "ok" else 503)

    async def _version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._about]})

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.model.name:
            raise ApiError(404, f"the model is {self.model.name!r}", "not_found_error")
        return _json(self._about)

    async def _complete(self, request: Request, chat: bool) -> Response:
        _require_json(request)
        parsed = await self._parse(await self._read_body(request), chat)
        events: _Events = asyncio.Queue()
        if self.outbox.stalled and not self.outbox.stopping:
            raise ApiError(503, "the ranks do not answer: one of them hangs, or computes for long", "server_error")
        count, most = len(parsed.prompts) * parsed.best_of, self.outbox.max_waiting
        if count > most:
            raise ApiError(400, f"the body asks for {count} answers: expected at most {most}")
        numbers = self.outbox.submit(parsed.answers, request.state.client, events.put_nowait)
        if numbers is None:
            if self.outbox.stopping:
                raise ApiError(503, "the server is stopping", "server_error")
            raise ApiError(429, "too many requests wait already: try again later", "rate_limit_error")
        answer = request.state.answer = Answer(self.model, parsed, numbers, self.outbox.cancel)
        streams = False
        try:
            if not parsed.stream:
                await _while_connected(request, self._finish(answer, events))
                return _json(await run_in_threadpool(answer.whole))
            # Wait for the first event before the status is sent, because the ranks may refuse the request.
            come = await _while_connected(request, _next(events))
            sent = self._chunk(answer, come[0]) if come else _KEEP_ALIVE  # raises what the ranks refuse
            streams = True
            return StreamingResponse(
                self._stream(answer, sent, come[1:], events),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache"},
                background=BackgroundTask(_close, answer),  # it also runs if the client disconnects
            )
        finally:
            if not streams:
                answer.close()

    async def _parse(self, body: bytes, chat: bool) -> ParsedRequest:
        """Parse a body, long ones one by one and at most half of the time: parsing holds Python's lock, which other
        requests' tokens need, too."""
        if len(body) <= _LONG:
            return await run_in_threadpool(parse_request, self.model, body, chat)
        async with self._parsing_long:
            began = time.monotonic()
            try:
                return await run_in_threadpool(parse_request, self.model, body, chat)
            finally:
                await asyncio.sleep(time.monotonic() - began)

    async def _finish(self, answer: Answer, events: _Events) -> None:
        while not answer.finished:
            for event in await events.get():
                answer.add(event)

    def _chunk(self, answer: Answer, event: Event) -> bytes:
        """Return what a stream sends for an event."""
        choice = answer.add(event)
        return b"" if choice is None else b"".join(map(_sent_event, answer.chunks(choice)))

    async def _stream(
        self, answer: Answer, sent: bytes, come: Sequence[Event], events: _Events
    ) -> AsyncIterator[bytes]:
        """Yield what a stream sends, in one part for the events that have come. sent: for the first, before `come`."""
        try:
            while True:
                for event in come:
                    sent += self._chunk(answer, event)
                if sent:
                    yield sent
                if answer.finished:
                    break
                come = await _next(events)
                sent = b"" if come else _KEEP_ALIVE
        except ApiError as error:  # the status has been sent already
            yield sent + _sent_event(error.body)
            return
        for last in answer.last_chunks():
            yield _sent_event(last)
        yield b"data: [DONE]\n\n"

    async def _read_body(self, request: Request) -> bytes:
        """Read the body. Raises ApiError: it is too large, or does not arrive in time."""
        most, data, size = self.max_body_bytes, bytearray(), 0
        length = request.headers.get("content-length", "0")
        if int(length) > most:
            raise ApiError(413, f"the body has {length} bytes: expected at most {most}")
        try:
            async with asyncio.timeout(self.timeout_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > most:
                        raise ApiError(413, f"the body has more than {most} bytes: expected at most these")
                    if size <= self.model.max_bytes:  # the rest is read for the client to get the reason, not kept
                        data += chunk
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self.timeout_s:g} s") from None
        if size > self.model.max_bytes:
            tokens = f"more than any prompt of {self.model.limits.prompt} tokens takes"
            raise ApiError(400, f"the body has {size} bytes, {tokens}: shorten the prompt")
        return bytes(data)


class _Observed:
    """Gives every request its `X-Request-Id`, the client's own if it sends one, and logs and counts its end.

    An error closes the connection if more of a body is to come than is worth reading.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, began = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        status = 499  # of clients that left before an answer
        unread = "transfer-encoding" in headers or int(headers.get("content-length", 0)) > _LONG

        async def read() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
                if status >= 400 and unread:
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        try:
            await self._app(scope, read, answer)
        finally:
            if scope["method"] == "POST":
                found = scope["state"].get("answer")
                if status >= 400 and status != 499:
                    self._metrics.refused(status)
                line = f"request {name}, {status}, {time.monotonic() - began:.3f} s"
                logger.info("%s", line if found is None else f"{line}, {self._metrics.ended(found)}")


class _RequireKey:
    """Rejects requests without a valid key, and notes the client's number."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = self._access.client(dict(scope["headers"]).get(b"authorization", b""))
        if client is None:
            raise ApiError(401, "missing or wrong API key: send Authorization: Bearer KEY", "authentication_error")
        scope["state"]["client"] = client
        await self._app(scope, receive, send)


class _RequireHost:
    """Rejects requests that call the server by a name that is not its own."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if self._access.allows_host(host):
            return await self._app(scope, receive, send)
        error = ApiError(421, f"Host: {host[:100]!r} is not served here; serve.allowed_hosts may name it")
        await _error(error)(scope, receive, send)


def _require_json(request: Request) -> None:
    """Refuse content types that a page of another site can have a browser send without asking this server first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type: {kind[:100]!r}: expected application/json")


async def _while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work unless the client disconnects before it is done. Raises ClientDisconnect: it did."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _close(answer: Answer) -> None:
    answer.close()  # not in another thread, as Starlette runs plain functions


async def _next(events: _Events) -> list[Event]:
    """Return the events that have come, waiting for some; none if there are none for a while."""
    come: list[Event] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(_KEEP_ALIVE_S):
            come += await events.get()
        while not events.empty():
            come += events.get_nowait()
    return come


def _sent_event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _json(body: Mapping[str, Any], status: int = 200, **headers: str) -> Response:
    if status in (429, 503):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    return Response(json.dumps(body), status, headers, "application/json")


def _error(error: ApiError) -> Response:
    headers = {"Connection": "close"} if error.status in (408, 413) or error.status >= 500 else {}
    return _json(error.body, error.status, **headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _not_found(request: Request, error: Exception) -> Response:
    """Answer a path, or a method of a path, that is not served."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {printable(request.url.path[:100])} is not served here"
    answer = _error(ApiError(error.status_code, message, "not_found_error"))
    answer.headers.update(error.headers or {})  # the methods that are allowed
    return answer


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never sent


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answer a bug of the server, which uvicorn logs."""
    return _error(ApiError(500, "the server failed on this request", "server_error"))
