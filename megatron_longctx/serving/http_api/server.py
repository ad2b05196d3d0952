"""uvicorn, bounded: connections, the time they may be silent or refuse to read, and the time to stop."""

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

from .app import Api, application

_STOP_S = 3
_LOOK_S = 0.5
_CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")


class _Connection(H11Protocol):
    """uvicorn itself waits forever for a request's head, and for a client that does not read; it counts connections
    that ask for nothing, and takes a client that has said all for one that has gone."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        self._half_closed = False
        self._look(None)
        self._make_room()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more: half of a connection, which it may read on, or all of it."""
        super().eof_received()
        if self._waits_for_client:
            return None  # and it will never come
        self._half_closed = True
        self._look_who_reads()
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and self._waits_for_client:  # all that it has asked for is answered
            self.transport.close()

    @property
    def _address(self) -> str | None:
        return self.client and self.client[0]

    @property
    def _waits_for_client(self) -> bool:
        """Whether the client has to move: nothing is asked for, or not all of it is said."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _make_room(self) -> None:
        """Where there are too many connections, close one that waits for its client: the first of those of the address
        that has most. Only where none does, this one is answered 503."""
        most = self.config.limit_concurrency
        self.limit_concurrency = None  # uvicorn would refuse requests of those that are connected already
        if most is None or len(self.connections) < most:
            return
        others = [c for c in self.connections if isinstance(c, _Connection) and c is not self]
        waiting = [c for c in others if c._waits_for_client and not c.transport.is_closing()]
        if not waiting:
            self.limit_concurrency = 0
            return
        of_address = Counter(c._address for c in waiting)
        min(waiting, key=lambda c: (-of_address[c._address], c._since)).transport.abort()

    def _look_who_reads(self) -> None:
        """After the client's end of file: an interim answer, which clients skip, tells whether anybody is there."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()  # it was refused: the client has gone
            return
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version != b"1.0":
            self.transport.write(self.conn.send(_CONTINUE))
        self.loop.call_later(_LOOK_S, self._look_who_reads)

    def _look(self, before: Any) -> None:
        """Look every `timeout_keep_alive` seconds; close where nothing has moved that the client has to move."""
        if self.transport.is_closing():
            return
        unsent = self.transport.get_write_buffer_size()
        now = (self.cycle, unsent)
        if now == before and (unsent or self.cycle is None or self.cycle.response_complete):
            self.transport.abort()
        else:
            self.loop.call_later(self.timeout_keep_alive, self._look, now)


def server_of(api: Api, max_connections: int) -> uvicorn.Server:
    """A server to run in a thread on a socket of its own. Of more than `max_connections` at once, those that wait for
    their clients are closed; further ones are answered 503."""
    config = uvicorn.Config(
        application(api),
        http=_Connection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # clients' mistakes are no news
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=max_connections + 1,  # the first that is too many
        timeout_keep_alive=math.ceil(api.timeout_s),
        timeout_graceful_shutdown=_STOP_S,
    )
    return uvicorn.Server(config)
