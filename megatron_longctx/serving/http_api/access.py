"""Who may ask: clients that show a key, and pages whose browsers name this server."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import refuse

API_KEY = "MEGATRON_LONGCTX_API_KEY"
"""Environment variable: keys, one a line."""

ANY_HOST = "*"


@dataclass(frozen=True)
class Access:
    """What a request has to show.

    Attributes:
        keys: one of them, if there are any.
        hosts: names by which the server may be called, in lower case; `*` for any. A page of another site that has its
            name resolve to this host cannot send another one than its own.
        loopback: names and addresses of this host itself may be called, too.
    """

    keys: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset({ANY_HOST})
    loopback: bool = True

    def client(self, authorization: bytes) -> int | None:
        """The number of the client that shows this header, from 1 on; 0 where no key is needed; None without one."""
        if not self.keys:
            return 0
        if authorization[:7].lower() == b"bearer ":  # a scheme's name has no case
            authorization = authorization[7:]
        # All are compared, so that the time says nothing of which.
        same = [hmac.compare_digest(authorization, key.encode()) for key in self.keys]
        return same.index(True) + 1 if any(same) else None

    def called(self, host: str) -> bool:
        """Whether the server may be called by this `Host`, which browsers always send."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return not host or ANY_HOST in self.hosts or name in self.hosts or (self.loopback and is_loopback(name))


def access_of(host: str, allowed_hosts: str | None, keys_file: str | None, environment: Mapping[str, str]) -> Access:
    """The rules of a server that listens at `host`.

    Args:
        allowed_hosts, keys_file: as `serve.allowed_hosts` and `serve.api_keys`.

    Raises:
        ValueError: a file without keys, or an address that is not this host's own without any.
    """
    keys = _keys(keys_file, environment)
    local = is_loopback(host)
    if not local and not keys:
        expected = f"a loopback address, or {API_KEY} in the environment or serve.api_keys"
        raise refuse("serve.host", host, expected, "Set a key.")
    if allowed_hosts is None:
        return Access(keys, frozenset() if local else frozenset({ANY_HOST}))
    names = (name.strip().lower() for name in allowed_hosts.split(","))
    return Access(keys, frozenset(name.strip("[]") for name in names if name), loopback=local)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _keys(path: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    lines = environment.get(API_KEY, "").splitlines()
    if path is not None:
        try:
            found = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise refuse("serve.api_keys", path, f"a file with a key a line ({reason})", "Write one.") from None
        if not any(map(str.strip, found)):
            raise refuse("serve.api_keys", path, "a file with a key a line (it has none)", "Write one.")
        lines += found
    return tuple(dict.fromkeys(key for line in lines if (key := line.strip())))
