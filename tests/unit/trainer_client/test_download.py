"""A download: its body whole however it comes, and every way to end early named."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from protos.errors import InvalidRequest, Unavailable
from trainer_client.gateway_http import download

BODY = bytes(range(256)) * 1024  # of several reads
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError):  # a client that waits for TLS leaves
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/under"


def with_length(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes) -> bytes:
    halves = body[: len(body) // 2], body[len(body) // 2 :]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(half), half) for half in halves if half)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def to_the_end(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body


def after_a_notice(body: bytes) -> bytes:
    return b"HTTP/1.1 100 Continue\r\n\r\n" + with_length(body)


async def get(url: str, timeout_s: float = 60.0) -> memoryview:
    return await download(url, "/experience/sample", body=b"{}", accept="*/*", timeout_s=timeout_s)


@pytest.mark.parametrize("form", [with_length, chunked, to_the_end, after_a_notice])
@pytest.mark.parametrize("size", [0, 1, 1 << 16, len(BODY)])
async def test_the_body_is_whole_however_it_comes(form: Callable[[bytes], bytes], size: int) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(form(BODY[:size]))
        await writer.drain()

    async with serving(answer) as url:
        found = await get(url)
    assert found == BODY[:size]
    assert found.readonly


async def test_a_head_in_pieces_is_read_like_a_whole_one() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(sent := with_length(b"body")), 5):
            writer.write(sent[at : at + 5])
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(answer) as url:
        assert await get(url) == b"body"


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "closed the connection before its answer ended"),
        (with_length(BODY)[:-1], "closed the connection before its answer ended"),
        (chunked(BODY)[:-8], "incomplete chunked read|closed"),
        (b"this is no HTTP\r\n\r\n", "illegal status line"),
        (b"x" * (1 << 20), "too long|illegal|line"),
    ],
)
async def test_an_answer_that_ends_early_or_is_none_is_named(sent: bytes, why: str) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            await writer.drain()

    async with serving(answer) as url:
        with pytest.raises(Unavailable, match=why):
            await get(url)


async def test_a_caller_that_leaves_closes_the_connection() -> None:
    left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(with_length(BODY)[:-1])
        started.set()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        left.set()

    started = asyncio.Event()
    async with asyncio.timeout(60), serving(answer) as url:
        task = asyncio.create_task(get(url))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await left.wait()


async def test_silence_in_the_middle_is_given_up() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(with_length(BODY)[:-1])
        with contextlib.suppress(ConnectionError):
            await reader.read()

    async with serving(answer) as url:
        with pytest.raises(Unavailable, match=r"silent for 0\.2 s"):
            await get(url, timeout_s=0.2)


async def test_an_address_of_another_scheme_is_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("a plain server completes no TLS handshake")

    async with serving(answer) as url:
        with pytest.raises(Unavailable):
            await get(url.replace("http://", "https://"), timeout_s=0.2)
        with pytest.raises(InvalidRequest, match="neither http:// nor https://"):
            await get(url.replace("http://", "unix://"))
