"""Finding a port for ranks to meet at."""

import socket


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
