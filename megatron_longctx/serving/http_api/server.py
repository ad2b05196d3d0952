"""The uvicorn server, with limits on connections, on the time that they may be silent or not read, and on stopping."""

import asyncio
import math
import time
from collections import Counter
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import Api

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
