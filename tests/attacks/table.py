"""Makes the attempts on a gateway of this process, and writes what it answered as docs/reference/attacks.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
from yarl import URL

from gateway.api import http_server
from gateway.app import Gateway
from tests.attacks.attempts import GROUPS, SIZE_MAX, Attempt
from tests.support.keys import CALL, HOLDERS, bearer, controlled, key_of
from tests.support.scripted_engine import ScriptedEngine

PAGE = Path(__file__).parents[2] / "docs/reference/attacks.md"
SHORT_S = 0.2
"""Instead of the half minutes that a head and a body may take."""
SHOWN_CHARS = 120
HEAD = """# What attempts on a gateway get

A gateway with API keys (`--api-keys`), asked by whoever reaches it. `python -m tests.attacks` makes these attempts on a
real gateway, and writes this page; `tests/unit/gateway_access/test_attack_table.py` makes them again, and compares.
[Security](../security.md) has the rules.

`alice` and `bob` are agents, `mine` is a session of alice's, and `theirs` one of bob's.
"""


@dataclass
class Scene:
    gateway: Gateway
    http: aiohttp.ClientSession
    mine: Mapping[str, str]

    def key(self, who: str) -> str:
        own = {
            "mine acts": self.mine["api_key"],
            "mine finishes": self.mine["finish_key"],
            "admin-cut": key_of("admin")[:-1],
        }
        return own.get(who, key_of(who) if who in HOLDERS else who)

    async def answer(self, attempt: Attempt) -> str:
        status, body = await (self._sent(attempt) if attempt.raw is None else self._raw(attempt.raw))
        return _told(status, body)

    async def _sent(self, attempt: Attempt) -> tuple[int, Any]:
        root = self.gateway.admin_url if attempt.admin else self.gateway.url
        headers = {name: value.replace("{admin}", key_of("admin")) for name, value in attempt.headers.items()}
        headers |= bearer(self.key(attempt.who)) if attempt.who else {}
        url = URL(root + attempt.path.replace("{admin}", key_of("admin")), encoded=True)
        async with self.http.request(attempt.method, url, json=attempt.body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def _raw(self, request: bytes) -> tuple[int, Any]:
        """Closed without an answer: status 0."""
        request = request.replace(b"{alice}", f"Authorization: Bearer {key_of('alice')}".encode())
        url = URL(self.gateway.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
            return int(head.split(b" ")[1]), json.loads(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, {}
        finally:
            writer.close()


def _told(status: int, body: Any) -> str:
    if not status:
        return "the connection is closed"
    error = body.get("error") if isinstance(body, dict) else None
    if error is None:
        return str(status)
    message = re.sub(r"127\.0\.0\.1:\d+|unix:\S+", "ADDRESS", error["message"]).replace("|", "\\|").replace("\n", " ")
    message = re.sub(r"\b\d+(\.\d+)? s\b", "N s", message)
    message = message.partition(" (")[0]  # without what would be right
    message = message.encode("unicode_escape").decode("ascii") if not message.isprintable() else message
    shown = message if len(message) <= SHOWN_CHARS else message[: SHOWN_CHARS - 3] + "..."
    return f"{status}: {shown}"


@contextlib.asynccontextmanager
async def scene(directory: Path) -> AsyncIterator[Scene]:
    settings: dict[str, Any] = {"body_bytes_max": SIZE_MAX}
    async with ScriptedEngine("e0") as e0, controlled(directory, e0, **settings) as (found, client):
        mine = await client.expect(200, "alice", "POST", "/sessions", {"session_id": "mine"})
        await client.expect(200, "bob", "POST", "/sessions", {"session_id": "theirs"})
        await client.expect(200, "alice", "POST", "/sessions/mine/v1/completions", CALL)
        await client.expect(200, "alice", "POST", "/groups", {"group_id": "g", "group_size": 1})
        async with aiohttp.ClientSession() as http:
            yield Scene(found, http, mine)


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    names = ("HEAD_TIMEOUT_S", "BODY_GRACE_S", "BODY_LOOK_S")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(http_server, name, SHORT_S))
        yield


async def table(directory: Path) -> Mapping[str, list[tuple[Attempt, str]]]:
    """What each attempt got, by its group."""
    with impatient():
        async with scene(directory) as found:
            return {
                name: [(attempt, await found.answer(attempt)) for attempt in attempts]
                for name, attempts in GROUPS.items()
            }


def page(answers: Mapping[str, list[tuple[Attempt, str]]]) -> str:
    lines = [HEAD]
    for name, rows in answers.items():
        lines += [f"## {name}", "", "| attempt | key | answer |", "|---|---|---|"]
        lines += [f"| {attempt.what} | {_who(attempt)} | {answer} |" for attempt, answer in rows]
        lines.append("")
    return "\n".join(lines)


def _who(attempt: Attempt) -> str:
    if attempt.raw is not None:
        return "alice" if b"{alice}" in attempt.raw else ""
    return {"admin-cut": "wrong", "x" * 24: "wrong", "mine acts": "`api_key`", "mine finishes": "`finish_key`"}.get(
        attempt.who, attempt.who
    )
