"""Bounds on what whoever reaches a gateway can make grow, over a whole gateway: what exceeds them is refused with a 429
that says when to come again, and which option mends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from gateway.api import http_server
from gateway.app import Gateway
from tests.support.keys import CALL, by, controlled
from tests.support.scripted_engine import ScriptedEngine, until
from tests.unit.gateway_api.test_status import gateway

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(found: Gateway, count: int = 1) -> AsyncIterator[list[Streams]]:
    url, streams = URL(found.url), list[Streams]()
    try:
        for _ in range(count):
            streams.append(await asyncio.open_connection(url.host, url.port))
        yield streams
    finally:
        for _, writer in streams:
            writer.close()


async def asked(stream: Streams, head: str = "GET /healthz HTTP/1.1\r\nHost: x\r\n", close: bool = False) -> bytes:
    """One request over a connection; its whole answer."""
    reader, writer = stream
    writer.write(f"{head}{'Connection: close' + chr(13) + chr(10) if close else ''}\r\n".encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in answer.lower().split(b"\r\n") if line.startswith(b"content-len"))
    return answer + await reader.readexactly(length)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def refused(answer: bytes, option: str) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    return (
        status_of(answer) == 429
        and b"Retry-After: " in head
        and error["code"] == "out_of_capacity"
        and option in error["message"]
    )


async def test_one_connection_too_many_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    async with gateway(tmp_path, connections_max=3) as (found, _), connected(found, 3) as streams:
        for stream in streams:
            assert status_of(await asked(stream)) in (200, 503)
        async with connected(found) as [more]:
            answer = await asked(more)
            assert refused(answer, "--connections-max"), answer
            assert await more[0].read() == b"", "it is closed"
        assert status_of(await asked(streams[0], close=True)) in (200, 503)
        await until(lambda: found.status.report().bounds.connections == 2, "a closed one gives its place back")
        async with connected(found) as [more]:
            assert status_of(await asked(more)) in (200, 503)
        bounds = found.status.report().bounds
        assert bounds.refused_connections == 1


async def test_one_that_is_refused_and_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REFUSED_S", 0.05)
    async with gateway(tmp_path, connections_max=1) as (found, _), connected(found, 2) as [first, second]:
        with contextlib.suppress(ConnectionError):
            assert await second[0].read() == b""
        assert status_of(await asked(first)) in (200, 503)


async def test_so_many_refused_ones_are_answered_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REFUSED_MAX", 1)
    monkeypatch.setattr(http_server, "REFUSED_S", 60.0)
    async with gateway(tmp_path, connections_max=1) as (found, _), connected(found, 3) as [first, second, third]:
        with contextlib.suppress(ConnectionError):
            assert await third[0].read() == b""
        assert refused(await asked(second), "--connections-max")
        assert status_of(await asked(first)) in (200, 503)


async def test_a_connection_that_says_nothing_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SILENCE_S", 0.05)
    async with gateway(tmp_path) as (found, _), connected(found) as [(reader, _)]:
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        await until(lambda: found.status.report().bounds.connections == 0, "it is closed")


async def test_strangers_keep_nobody_with_a_key_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who have sent nothing, half a head, and requests without a right key; all of them hold their places."""
    monkeypatch.setattr("gateway.app.STRANGER_S", 0.0)
    async with controlled(tmp_path, connections_max=4) as (found, _), connected(found, 4) as strangers:
        strangers[0][1].write(b"GET /status HT")
        assert status_of(await asked(strangers[1], "GET /status HTTP/1.1\r\nHost: x\r\n")) == 401
        assert status_of(await asked(strangers[2], "GET /healthz HTTP/1.1\r\nHost: x\r\n")) in (200, 503)
        request = f"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: {by('reader')['Authorization']}\r\n"
        async with connected(found, 4) as known:
            for stream in known:
                assert status_of(await asked(stream, request)) == 200
            for reader, _ in strangers:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
            async with connected(found) as [more]:
                assert refused(await asked(more, request), "--connections-max"), "those with keys make no way"
            for stream in known:
                assert status_of(await asked(stream, request)) == 200
        bounds = found.status.report().bounds
        assert bounds.made_way == 4


async def test_bodies_that_come_in_at_once_are_bounded_together(tmp_path: Path) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n"
    async with (
        ScriptedEngine("e0") as e0,
        gateway(tmp_path, e0, bodies_bytes_max=1000) as (found, http),
        connected(found) as [(reader, writer)],
    ):
        writer.write(head.format(900).encode() + b"Expect: 100-continue\r\n\r\n")
        assert status_of(await reader.readuntil(b"\r\n\r\n")) == 100
        async with connected(found, 2) as [more, other]:
            assert refused(await asked(more, head.format(200)), "--bodies-bytes-max")
            assert status_of(await asked(other)) in (200, 503), "what has no body is taken"
        async with http.post("/v1/completions", json=CALL) as small:
            assert small.status == 200, "and so is one that comes with its head"
        writer.write(b" " * 900)
        assert status_of(await reader.readuntil(b"\r\n\r\n")) == 400
        async with http.post("/v1/completions", data=json.dumps(CALL).encode() + b" " * 500) as large:
            assert large.status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_packed_body_counts_as_the_largest(tmp_path: Path, encoding: str) -> None:
    """A thousand bytes of gzip become a million: their declared size says nothing of the memory that they take."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Encoding: {encoding}\r\nContent-Length: 100\r\n"
    )
    async with (
        gateway(tmp_path, body_bytes_max=1000, bodies_bytes_max=1500) as (found, _),
        connected(found, 2) as [(reader, writer), more],
    ):
        writer.write(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert status_of(await reader.readuntil(b"\r\n\r\n")) == 100
        async with asyncio.timeout(30):
            assert refused(await asked(more, head), "--bodies-bytes-max")


async def test_a_holder_has_so_many_sessions(tmp_path: Path) -> None:
    async with ScriptedEngine("e0") as e0, controlled(tmp_path, e0, sessions_per_key=2) as (found, client):
        for who in ("alice", "alice again"):
            await client.expect(200, who, "POST", "/sessions")
        for path, body in (("/sessions", {}), ("/sessions/new/v1/completions", CALL), ("/v1/completions", CALL)):
            async with client.http.post(path, json=body, headers=by("alice")) as answer:
                told = await answer.json()
                assert (answer.status, int(answer.headers["Retry-After"]) > 0) == (429, True), told
                assert "the key of alice has 2 live sessions" in told["error"]["message"]
                assert "--sessions-per-key" in told["error"]["message"]
        await client.expect(200, "bob", "POST", "/sessions", {"session_id": "bobs"})
        bounds = (await client.expect(200, "reader", "GET", "/status"))["bounds"]
        assert bounds["holders"] == {"alice": {"sessions": 2, "turns": 0}, "bob": {"sessions": 1, "turns": 0}}
        assert bounds["refused_by_key"] == 3
        await client.expect(200, "bob", "POST", "/sessions/bobs/abandon")
        assert "bob" not in (await client.expect(200, "reader", "GET", "/status"))["bounds"]["holders"]
        assert len(found.parts.live) == 2, "what was refused has made no session"


async def test_a_holder_has_so_many_turns(tmp_path: Path) -> None:
    held: dict[str, Any] = {**CALL, "max_tokens": 12}
    async with ScriptedEngine("e0", hold_at=4) as e0, controlled(tmp_path, e0, turns_per_key=2) as (found, client):
        for name in ("a", "b"):
            await client.expect(200, "alice", "POST", "/sessions", {"session_id": name})
        turns = [asyncio.create_task(client.send("alice", "POST", f"/sessions/{s}/v1/completions", held)) for s in "ab"]
        await until(lambda: len(found.sessions.running) == 2, "both turns run")
        for path in ("/sessions/a/v1/completions", "/v1/completions"):
            told = await client.expect(429, "alice", "POST", path, CALL)
            assert "--turns-per-key" in told["error"]["message"]
        shown = (await client.expect(200, "reader", "GET", "/status"))["bounds"]["holders"]["alice"]
        assert shown == {"sessions": 2, "turns": 2}
        e0.go.set()
        assert [status for status, _ in await asyncio.gather(*turns)] == [200, 200]
        await client.expect(200, "alice", "POST", "/sessions/a/v1/completions", CALL)
        told = await client.expect(429, "alice", "POST", "/sessions/a/v1/completions", {**CALL, "n": 3})
        assert "this request has 3" in told["error"]["message"]


async def test_counts_survive_a_restart(tmp_path: Path) -> None:
    async with controlled(tmp_path, sessions_per_key=1) as (_, client):
        await client.expect(200, "alice", "POST", "/sessions", {"session_id": "a"})
    async with controlled(tmp_path, sessions_per_key=1) as (_, client):
        await client.expect(429, "alice", "POST", "/sessions")
        await client.expect(200, "alice", "POST", "/sessions/a/abandon")
        await client.expect(200, "alice", "POST", "/sessions")
