"""The HTTP server before any handler: requests that never come to their end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import cast

import pytest
from aiohttp import web

from gateway.api import http_server
from gateway.runtime.rounds import Rounds
from tests.support import codecs
from tests.support.turns import Script, ScriptedTurns, serving

WAIT_S = 30.0
"""Far more than any deadline here: reached only by what hangs."""
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x"}]}).encode()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_server, "BODY_GRACE_S", 0.1)
    monkeypatch.setattr(http_server, "BODY_LOOK_S", 0.05)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (HEAD, "head was not whole"),
        (b"P", "head was not whole"),
        (HEAD + b"Content-Length: 100\r\n\r\n{", "of the request's body"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", "of the request's body"),
    ],
)
async def test_what_never_ends_is_given_up(sent: bytes, message: str) -> None:
    async with serving(ScriptedTurns(lambda request: Script([2])), codecs.tiny()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(sent)
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            [length] = [int(line[16:]) for line in head.splitlines() if line.lower().startswith(b"content-length: ")]
            error = json.loads(await reader.readexactly(length))["error"]
        assert head.startswith(b"HTTP/1.1 408 ")
        assert message in error["message"]
        assert error["code"] == "request_timeout"
        writer.close()


async def test_a_connection_that_is_kept_has_a_deadline_for_each_head() -> None:
    async with serving(ScriptedTurns(lambda request: Script([2])), codecs.tiny()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        asked = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        for _ in range(2):
            writer.write(asked)
            async with asyncio.timeout(WAIT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                [length] = [int(li[16:]) for li in head.splitlines() if li.lower().startswith(b"content-length: ")]
                await reader.readexactly(length)
            assert head.startswith(b"HTTP/1.1 200 ")
        writer.write(asked[:20])
        async with asyncio.timeout(WAIT_S):
            assert b" 408 " in await reader.read()
        writer.close()


async def test_a_body_that_comes_after_its_answer_is_no_late_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows an answer that needed no body is that body, and the kept connection takes the next request."""
    monkeypatch.setattr(http_server, "BODY_GRACE_S", WAIT_S)
    async with serving(ScriptedTurns(lambda request: Script([2])), codecs.tiny()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST /no/such/route HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            [length] = [int(line[16:]) for line in head.splitlines() if line.lower().startswith(b"content-length: ")]
            await reader.readexactly(length)
        assert head.startswith(b"HTTP/1.1 404 ")
        for _ in range(2):
            writer.write(b"x" * 10_000)
            await asyncio.sleep(0.15)  # beyond a head's deadline
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_slow_body_that_comes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_BYTES_PER_S_MIN", 1)
    async with serving(ScriptedTurns(lambda request: Script([2])), codecs.tiny()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[:-1])
        await asyncio.sleep(0.3)  # well beyond the grace: what has come pays for it
        writer.write(BODY[-1:])
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_requests_that_come_together_begin_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are answered, in pieces or not, and no round of the loop begins more than one of them."""
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", WAIT_S)
    begun: list[int] = []
    round_, take = 0, http_server._Connection._take

    def taking(self: http_server._Connection, data: bytes) -> None:
        begun.append(round_)
        take(self, data)

    monkeypatch.setattr(http_server._Connection, "_take", taking)
    async with serving(ScriptedTurns(lambda request: Script([2])), codecs.tiny()) as url:
        clients = [await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])) for _ in range(20)]
        asked = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        for number, (_, writer) in enumerate(clients):
            writer.write(asked if number % 2 else asked[:30])
        clients[4][1].close()  # while its request is held, or just taken

        async def count() -> None:
            nonlocal round_
            while True:
                round_ += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        for _, writer in clients[0:4:2] + clients[6::2]:
            writer.write(asked[30:])
        for number, (reader, writer) in enumerate(clients):
            if number != 4:
                async with asyncio.timeout(WAIT_S):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 200 "), number
            writer.close()
        counting.cancel()
    assert len(set(begun)) >= 20, begun


async def test_of_a_request_that_waits_for_its_round_no_more_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thousand strangers that begin together would have their bodies in memory before any key is looked at."""
    waiting: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
    async with serving(ScriptedTurns(lambda request: Script([2])), codecs.tiny()) as url:
        with monkeypatch.context() as busy:
            busy.setattr(Rounds, "take", lambda rounds, let_in: waiting.put_nowait(let_in))
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            async with asyncio.timeout(WAIT_S):
                let_in = await waiting.get()
        connection = cast(web.RequestHandler, let_in.__self__)  # type: ignore[attr-defined]
        assert isinstance(connection.transport, asyncio.Transport)
        assert not connection.transport.is_reading()
        let_in()
        assert connection.transport.is_reading()
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
