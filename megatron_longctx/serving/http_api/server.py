"""The uvicorn server, with limits on connections, on the time that they may be silent or not read, and on stopping."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import Counter
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import Api

_STOP_S = 3
_PROBE_S = 0.5
_CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")


class _Connection(H11Protocol):
    """A connection with limits that uvicorn lacks.

    uvicorn itself waits forever for a request's head and for a client that does not read. It counts connections without
    a request, and it treats a client that has closed only its sending half as disconnected.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        self._half_closed = False
        self._check_progress(None)
        self._make_room()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Handle the end of what the client sends: it may still read, or have closed the whole connection."""
        super().eof_received()
        if self._waits_for_client:
            return None  # the rest of the request will never come
        self._half_closed = True
        self._probe()
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and self._waits_for_client:  # all its requests are answered
            self.transport.close()

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

    def _probe(self) -> None:
        """After the client's end of file, send interim answers, which clients skip, to find out if it still reads."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()  # the probe was rejected: the client has gone
            return
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version != b"1.0":
            self.transport.write(self.conn.send(_CONTINUE))
        self.loop.call_later(_PROBE_S, self._probe)

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
    """Return a server to run in a thread, on a socket that the caller provides.

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
