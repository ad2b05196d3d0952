"""Who may send requests: clients with an API key, and web pages that call this server by its own name."""

import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ...config import ServeConfig
from ...core.errors import refuse

API_KEY = "MEGATRON_LONGCTX_API_KEY"
"""The environment variable with API keys, one per line."""

ANY_HOST = "*"


@dataclass(frozen=True)
class Access:
    """The conditions for a request."""

    keys: tuple[str, ...] = ()  # the API keys; if there are none, no key is needed
    # The names in lower case by which clients may call the server; `*` for any. They stop a page of another site whose
    # name resolves to this host, because its browser sends that name.
    hosts: frozenset[str] = frozenset({ANY_HOST})
    loopback: bool = True  # whether the names and addresses of this host itself are allowed, too

    def client(self, authorization: bytes) -> int | None:
        """Return the number of the client with this header, from 1 on; 0 if no key is needed; None for no valid key."""
        if not self.keys:
            return 0
        if authorization[:7].lower() == b"bearer ":  # the scheme's name is case-insensitive
            authorization = authorization[7:]
        # Compare all keys, so that the time does not tell which one matches.
        same = [hmac.compare_digest(authorization, key.encode()) for key in self.keys]
        return same.index(True) + 1 if any(same) else None

    def allows_host(self, host: str) -> bool:
        """Whether the server may be called by this `Host` header, which browsers always send."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return not host or ANY_HOST in self.hosts or name in self.hosts or (self.loopback and is_loopback(name))


def build_access(settings: ServeConfig, environment: Mapping[str, str]) -> Access:
    """Return the conditions of a server with these settings.

    Refuse a key file without keys, and an address that is not a loopback address if there are no keys.
    """
    keys = _keys(settings.api_keys, environment)
    local = is_loopback(settings.host)
    if not local and not keys:
        expected = f"a loopback address, or {API_KEY} in the environment or serve.api_keys"
        raise refuse("serve.host", settings.host, expected, "Set a key.")
    if settings.allowed_hosts is None:
        return Access(keys, frozenset() if local else frozenset({ANY_HOST}))
    names = (name.strip().lower() for name in settings.allowed_hosts.split(","))
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
            with open(path, encoding="utf-8") as stream:
                status = os.fstat(stream.fileno())
                if status.st_uid == os.getuid() and status.st_mode & 0o077:  # the rule of ssh
                    expected = f"a file that only its owner can read; its mode is {status.st_mode & 0o777:o}"
                    raise refuse("serve.api_keys", path, expected, f"Run chmod 600 {path}")
                in_file = stream.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise refuse("serve.api_keys", path, f"a file with a key a line ({reason})", "Write one.") from None
        if not any(map(str.strip, in_file)):
            raise refuse("serve.api_keys", path, "a file with a key a line (it has none)", "Write one.")
        lines += in_file
    return tuple(dict.fromkeys(key for line in lines if (key := line.strip())))
