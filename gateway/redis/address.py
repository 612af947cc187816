"""The address of a Redis as users write it: `redis://[USER:PASSWORD@]HOST[:PORT][/DB]`, `rediss://` with TLS."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from protos.errors import InvalidRequest

PORT = 6379
PASSWORD_VARIABLE = "LAMINAR_REDIS_PASSWORD"  # noqa: S105 - its name, not a password
"""The environment variable with the password, which then stands in no list of processes."""
_HINT = "write redis://HOST:PORT/DB, such as redis://10.0.0.5:6379/0; rediss:// for TLS"


def is_redis(text: str) -> bool:
    return text.startswith(("redis://", "rediss://"))


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """`str()` shows it without user and password: for logs, errors and the status."""

    host: str
    port: int = PORT
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> RedisAddress:
        """Raises InvalidRequest with what would be right."""
        if not is_redis(text):
            raise InvalidRequest("this is no address of a Redis", hint=_HINT)
        try:
            parts = urlsplit(text)
            port = parts.port or PORT
        except ValueError as e:
            raise InvalidRequest(f"the address of the Redis: {e}", hint=_HINT) from e
        db = parts.path.strip("/") or "0"
        if not parts.hostname or not db.isdecimal() or parts.query or parts.fragment:
            raise InvalidRequest("the address of the Redis has no host, or something behind its number", hint=_HINT)
        password = unquote(parts.password) if parts.password else os.environ.get(PASSWORD_VARIABLE) or None
        user = unquote(parts.username) if parts.username else None
        return cls(parts.hostname, port, int(db), user, password, parts.scheme == "rediss")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.tls else ''}://{host}:{self.port}/{self.db}"
