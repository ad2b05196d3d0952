"""uvicorn, bounded: connections, the time they may be silent or refuse to read, and the time to stop."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import Api, application

_STOP_S = 3


class _Connection(H11Protocol):
    """uvicorn itself waits forever for a request's head, and for a client that does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look(None)

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
    """A server to run in a thread on a socket of its own. More than `max_connections` at once are answered 503."""
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
