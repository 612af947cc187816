"""Gateways with access control, for tests: a key file, and who has which key."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from gateway.app import Gateway
from protos.access.roles import Role
from protos.access.unix_socket import socket_path
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.unit.gateway_api.test_status import gateway

HOLDERS: Mapping[str, tuple[Role, str]] = {
    "admin": ("admin", "root"),
    "trainer": ("trainer", "trainer-0"),
    "alice": ("agent", "alice"),
    "alice again": ("agent", "alice"),  # another key of the same name
    "bob": ("agent", "bob"),
    "reader": ("reader", "board"),
}
CALL = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2}


def key_of(who: str) -> str:
    return f"key-of-{who.replace(' ', '-')}-".ljust(24, "x")


def lines(*who: str) -> str:
    return "".join(f"{' '.join(HOLDERS[one])} {key_of(one)}\n" for one in who or HOLDERS)


def key_file(directory: Path, *who: str) -> Path:
    path = directory / "api-keys"
    path.write_text(lines(*who))
    path.chmod(0o600)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def by(who: str) -> dict[str, str]:
    return bearer(key_of(who))


class Client:
    """Requests to a gateway, each with the key of somebody, or with a key as it is given."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http

    async def send(self, who: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """The status, and the body as JSON or text. `who`: a name of `HOLDERS`, a key, or "" for nobody."""
        key = key_of(who) if who in HOLDERS else who
        given = {**(bearer(key) if key else {}), **headers}
        async with self.http.request(method, path, json=body, headers=given) as answer:
            return answer.status, await (answer.json() if answer.content_type == "application/json" else answer.text())

    async def expect(self, status: int, who: str, method: str, path: str, body: Any = None, **headers: str) -> Any:
        found, answer = await self.send(who, method, path, body, **headers)
        assert found == status, f"{who}: {method} {path}: {found} {answer}"
        return answer


@contextlib.asynccontextmanager
async def operators(found: Gateway) -> AsyncIterator[Client]:
    """A client of the gateway's admin listener."""
    path = socket_path(found.admin_url)
    root = found.admin_url if path is None else "http://gateway"
    connector = aiohttp.TCPConnector() if path is None else aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession(root, connector=connector) as http:
        yield Client(http)


@contextlib.asynccontextmanager
async def controlled(
    directory: Path, *engines: ScriptedEngine, **settings: Any
) -> AsyncIterator[tuple[Gateway, Client]]:
    """A running gateway with the keys of `HOLDERS`, and a client of it."""
    settings = {"api_keys": key_file(directory), **settings}
    async with gateway(directory, *engines, **settings) as (found, http):
        yield found, Client(http)
