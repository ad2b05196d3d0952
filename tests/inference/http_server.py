"""A server in a thread of this process. Tests take requests from the inbox in place of rank 0, and answer them."""

import asyncio
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from megatron_longctx.inference.scheduler import Event, Request, RequestLimits
from megatron_longctx.models.chat import Chat
from megatron_longctx.serving.http_api import server
from megatron_longctx.serving.http_api.access import Access
from megatron_longctx.serving.http_api.app import Api
from megatron_longctx.serving.http_api.inbox import Inbox, Outbox
from megatron_longctx.serving.http_api.parsing import Model
from megatron_longctx.serving.http_api.server import build_server
from tests.shared.jobs import PATIENCE_S

BODY = {"prompt": "ab", "max_tokens": 9}
LIMITS = RequestLimits(tokens=10**4, positions=None, vocab_size=1000)
LONG = 1000  # a token with a long text
LONG_TEXT = "x" * 200_000


def decode(ids: Any) -> str:
    return "".join(LONG_TEXT if i == LONG else chr(i) for i in ids)


def encode(text: str) -> list[int]:
    if text == "break":
        raise RuntimeError("a mistake of the server")
    return list(text.encode())


@dataclass
class Served:
    """A running server, its port and both ends of its connection to rank 0."""

    port: int
    inbox: Inbox
    outbox: Outbox
    _server: uvicorn.Server
    _taken: list[Request | int] = field(default_factory=list)

    def hurry(self) -> None:
        """Check the progress of the present connections all the time from now on."""
        for connection in list(self._server.server_state.connections):
            assert isinstance(connection, server._Connection)
            connection.timeout_keep_alive = 0.05
            connection.loop.call_soon_threadsafe(connection._check_progress, None)

    def take(self) -> Request | int:
        """Return the next item that arrives."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._taken:
            assert time.monotonic() < deadline, "nothing arrives"
            self._taken += self.inbox.take(wait=True)
        return self._taken.pop(0)

    def request(self) -> Request:
        found = self.take()
        assert isinstance(found, Request)
        return found

    def say(self, number: int, text: str, reason: str | None = None) -> None:
        """Deliver the request's next tokens, the last with `reason`."""
        for i, letter in enumerate(text):
            self.inbox.deliver([Event(number, ord(letter), reason if i == len(text) - 1 else None, cached_tokens=1)])

    def connect(self, head: str = "", body: bytes = b"", **headers: str) -> socket.socket:
        """Connect, and send a head with these headers (`_` for `-`) and a body, or nothing."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        if head:
            fields = {"Host": "here", "Content_Type": "application/json"} | headers
            lines = [f"{head} HTTP/1.1", *(f"{k.replace('_', '-')}: {v}" for k, v in fields.items())]
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        return connection

    def post(self, body: Any, path: str = "/v1/completions") -> socket.socket:
        """Connect and send a request."""
        data = json.dumps(body).encode()
        return self.connect(f"POST {path}", data, Content_Length=str(len(data)))

    def ask(self, body: Any, path: str = "/v1/completions") -> tuple[int, Any, http.client.HTTPResponse]:
        """Return the answer to a request that the ranks do not see."""
        return answer_on(self.post(body, path))

    def get(self, path: str, **headers: str) -> tuple[int, Any, http.client.HTTPResponse]:
        return answer_on(self.connect(f"GET {path}", **headers))

    def complete(self, connection: socket.socket, text: str = "c") -> Any:
        """Answer the request of this connection with `text`, and return the body, which has to have status 200."""
        self.say(self.request().number, text, "length")
        status, body, _ = answer_on(connection)
        assert status == 200
        return body


def answer_on(connection: socket.socket) -> tuple[int, Any, http.client.HTTPResponse]:
    with connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        text = response.read()
        return response.status, json.loads(text) if text.startswith((b"{", b"[")) else text, response


def ended(connection: socket.socket) -> bool:
    """Whether the server closes the connection without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def serving(
    max_waiting: int = 8,
    max_connections: int = 100,
    timeout_s: float = 30.0,
    access: Access | None = None,
    chat: Chat | None = None,
    stalled_s: float = math.inf,
    encode: Callable[[str], list[int]] = encode,
    origins: tuple[str, ...] = (),
) -> Iterator[Served]:
    model = Model("m", encode, decode, 0, chat or Chat(), 16, LIMITS, 1)
    (ours, theirs), shared = socket.socketpair(), Inbox.new_shared()
    inbox, outbox = Inbox(ours, shared), Outbox(theirs, shared, max_waiting, stalled_s)
    api = Api(model, outbox, 1000, timeout_s, access or Access(), origins)
    listener = socket.create_server(("127.0.0.1", 0))
    running = build_server(api, max_connections)
    running.config.timeout_keep_alive = math.ceil(PATIENCE_S)  # do not close slow connections on a busy machine

    async def run() -> None:
        assert await outbox.open() == LIMITS
        await asyncio.gather(running.serve([listener]), outbox.follow(api.metrics.show, running))

    inbox.open(LIMITS)
    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield Served(listener.getsockname()[1], inbox, outbox, running)
    finally:
        inbox.stop()
        thread.join(PATIENCE_S)
        ours.close()
        assert not thread.is_alive()
