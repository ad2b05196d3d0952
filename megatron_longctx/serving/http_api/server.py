"""The process of the HTTP interface: uvicorn, with limits on connections, on the time that they may be silent or not
read, and on stopping."""

import asyncio
import functools
import gc
import logging
import math
import os
import socket
import sys
import time
from collections import Counter
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...config import Config, ServeConfig
from ...core.errors import refuse
from ...mcore.tokenizer import bos_tokens, build_tokenizer, decoder, encoder, max_token_chars
from ...models.chat import load_chat
from ..grammar import Grammars
from .access import build_access
from .app import Api
from .inbox import Outbox
from .parsing import Model

logger = logging.getLogger(__name__)

_STOP_S = 3


class _Connection(H11Protocol):
    """A connection with limits that uvicorn lacks.

    uvicorn itself waits forever for a request's head and for a client that does not read, and it counts connections
    without a request.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        self._check_progress(None)
        self._make_room()

    @property
    def _address(self) -> str | None:
        return self.client and self.client[0]

    @property
    def _waits_for_client(self) -> bool:
        """Whether it is the client's turn: there is no request, or its body is incomplete."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _make_room(self) -> None:
        """If there are too many connections, close one that waits for its client: the oldest of the address that has
        most of these. If none waits, answer this one with 503."""
        most = self.config.limit_concurrency
        self.limit_concurrency = None  # uvicorn would refuse requests of existing connections
        if most is None or len(self.connections) < most:
            return
        others = [c for c in self.connections if isinstance(c, _Connection) and c is not self]
        waiting = [c for c in others if c._waits_for_client and not c.transport.is_closing()]
        if not waiting:
            self.limit_concurrency = 0
            return
        of_address = Counter(c._address for c in waiting)
        min(waiting, key=lambda c: (-of_address[c._address], c._since)).transport.abort()

    def _check_progress(self, before: Any) -> None:
        """Every `timeout_keep_alive` seconds, close the connection if the client has neither read nor sent anything."""
        if self.transport.is_closing():
            return
        unsent = self.transport.get_write_buffer_size()
        now = (self.cycle, unsent)
        if now == before and (unsent or self.cycle is None or self.cycle.response_complete):
            self.transport.abort()
        else:
            self.loop.call_later(self.timeout_keep_alive, self._check_progress, now)


def build_server(api: Api, max_connections: int) -> uvicorn.Server:
    """Return a server to run on a socket that the caller provides.

    Beyond `max_connections`, connections that wait for their clients are closed, or new ones are answered with 503.
    """
    config = uvicorn.Config(
        api.application(),
        http=_Connection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # clients' mistakes are not logged
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=max_connections + 1,  # the first one too many
        timeout_keep_alive=math.ceil(api.timeout_s),
        timeout_graceful_shutdown=_STOP_S,
    )
    return uvicorn.Server(config)


def listen(settings: ServeConfig) -> socket.socket:
    """Return a socket that listens at the address of the settings. Refuse one that is taken or not this host's."""
    address = settings.host, settings.port
    try:
        listener = socket.create_server(address, family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        where, expected = f"{settings.host}:{settings.port}", f"an address to listen at ({reason})"
        raise refuse("serve.host:serve.port", where, expected, "Choose another port; 0 takes any free one.") from None
    # Connections inherit it. Otherwise the first token, behind the headers, waits 40 ms for the client to acknowledge
    # these; asyncio sets it only if the listener's protocol is TCP by number, and that of `create_server` is 0.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def run(_: int, config: Config, name: str, end: socket.socket, shared: Any, stalled_s: float) -> None:
    """Serve the model `name` of a job from when rank 0 is ready until it stops, as a process of its own."""
    gc.freeze()  # a full collection of what is imported takes half a second
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)  # if it is no fork
    logging.getLogger(__package__.partition(".")[0]).setLevel(logging.INFO)
    outbox = Outbox(end, shared, config.serve.max_waiting, stalled_s)
    asyncio.run(_run(config, name, outbox))


async def _run(config: Config, name: str, outbox: Outbox) -> None:
    settings, tokenizer = config.serve, build_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    grammars = functools.cache(lambda: Grammars(tokenizer))  # a large vocabulary takes a second
    model = Model(
        name=name,
        encode=encoder(tokenizer),
        decode=decoder(tokenizer),
        stop_token=tokenizer.eod,
        chat=load_chat(config.inference.chat_template, tokenizer),
        default_tokens=config.inference.max_new_tokens,
        max_token_chars=max_token_chars(tokenizer),
        begin=tuple(bos_tokens(tokenizer)),
        check_grammar=lambda grammar: grammars().compile(grammar),
        limits=await outbox.open(),  # when the rest is ready
    )
    origins = tuple(filter(None, map(str.strip, (settings.allowed_origins or "").split(","))))
    access = build_access(settings, os.environ)
    api = Api(model, outbox, settings.max_body_bytes, settings.timeout_s, access, origins)
    server, listener = build_server(api, settings.max_connections), listen(settings)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    logger.info("serving %s at http://%s:%d/v1", name, host, listener.getsockname()[1])
    await asyncio.gather(server.serve([listener]), outbox.follow(api.metrics.show, server))
