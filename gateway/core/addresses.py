"""Addresses of stores that gateways share, as users write them: `SCHEME://[USER:PASSWORD@]HOST[:PORT][,HOST...][/NAME]`.

Of several hosts, such as a primary and its replica, the one is used that takes writes when a connection is made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self
from urllib.parse import unquote

from protos.errors import InvalidRequest

_FORM = re.compile(r"([a-z]+)://(?:([^:@/]*)(?::([^@/]*))?@)?([^/?#]+)(?:/([^/?#]*))?/?")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """`str()` shows it without user and password: for logs, errors and the status."""

    KIND: ClassVar[str]
    TLS: ClassVar[Mapping[str, bool]]
    """By scheme, whether it uses TLS."""
    PORT: ClassVar[int]
    PASSWORD_VARIABLE: ClassVar[str]
    """The environment variable with the password, which then stands in no list of processes."""
    FORM: ClassVar[str]
    EXAMPLE: ClassVar[str]

    hosts: tuple[tuple[str, int], ...]
    name: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises InvalidRequest with what would be right."""
        found = _FORM.fullmatch(text)
        hosts = [_HOST.fullmatch(host) for host in found[4].split(",")] if found else []
        if found is None or found[1] not in cls.TLS or None in hosts:
            raise cls._wrong(f"this is no address of a {cls.KIND}")
        named = [(host[1].strip("[]"), int(host[2] or cls.PORT)) for host in hosts if host is not None]
        if any(not 0 < port < 65536 for _, port in named):
            raise cls._wrong(f"the address of the {cls.KIND} has a port beyond 65535")
        password = unquote(found[3]) if found[3] else os.environ.get(cls.PASSWORD_VARIABLE) or None
        user = unquote(found[2]) if found[2] else None
        return cls(tuple(named), cls._named(found[5] or ""), user, password, cls.TLS[found[1]])

    @classmethod
    def _named(cls, name: str) -> str:
        return unquote(name)

    @classmethod
    def _wrong(cls, what: str) -> InvalidRequest:
        return InvalidRequest(what, hint=f"write {cls.FORM}, such as {cls.EXAMPLE}")

    def __str__(self) -> str:
        scheme = next(name for name, tls in self.TLS.items() if tls == self.tls)
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{scheme}://{hosts}/{self.name}"


class RedisAddress(StoreAddress):
    """`name`: the database's number."""

    KIND = "Redis"
    TLS: ClassVar[Mapping[str, bool]] = {"redis": False, "rediss": True}
    PORT = 6379
    PASSWORD_VARIABLE = "LAMINAR_REDIS_PASSWORD"  # noqa: S105 - its name, not a password
    FORM = "redis://HOST:PORT/DB"
    EXAMPLE = "redis://10.0.0.5:6379/0; rediss:// for TLS"

    @classmethod
    def _named(cls, name: str) -> str:
        if name and not name.isdecimal():
            raise cls._wrong("the address of the Redis has something else than a number behind its host")
        return name or "0"


class PostgresAddress(StoreAddress):
    """`name`: the database's."""

    KIND = "PostgreSQL"
    TLS: ClassVar[Mapping[str, bool]] = {"postgresql": False, "postgresqls": True}
    PORT = 5432
    PASSWORD_VARIABLE = "LAMINAR_POSTGRES_PASSWORD"  # noqa: S105 - its name, not a password
    FORM = "postgresql://USER@HOST:PORT/DATABASE"
    EXAMPLE = "postgresql://laminar@10.0.0.5:5432/laminar; postgresqls:// for TLS"

    @classmethod
    def _named(cls, name: str) -> str:
        return unquote(name) or "laminar"
