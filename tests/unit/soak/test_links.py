"""A link passes everything, and is cut, silenced and slowed as it is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.soak.links import Link

LONG = bytes(range(256)) * 4096


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[Link]:
    """A link to a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    probe = await asyncio.start_server(echo, "127.0.0.1", 0)
    listen = probe.sockets[0].getsockname()
    probe.close()
    link = Link("echo", listen, server.sockets[0].getsockname())
    await link.start()
    try:
        yield link
    finally:
        await link.close()
        server.close()


async def test_all_bytes_pass_in_order_and_the_end_too() -> None:
    async with echoing() as link:
        reader, writer = await asyncio.open_connection(*link.listen)
        writer.write(LONG)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(-1), 60) == LONG
        writer.close()


async def test_a_cut_resets_what_is_open_and_refuses_what_comes_until_it_heals() -> None:
    async with echoing() as link:
        reader, writer = await asyncio.open_connection(*link.listen)
        writer.write(b"a")
        assert await asyncio.wait_for(reader.readexactly(1), 60) == b"a"
        link.break_connections()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reader.readexactly(1), 60)
        other, its_writer = await asyncio.open_connection(*link.listen)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(other.readexactly(1), 60)
        link.heal()
        reader, healed = await asyncio.open_connection(*link.listen)
        healed.write(b"b")
        assert await asyncio.wait_for(reader.readexactly(1), 60) == b"b"
        for one in (writer, its_writer, healed):
            one.close()


async def test_silence_holds_back_and_loses_nothing() -> None:
    async with echoing() as link:
        reader, writer = await asyncio.open_connection(*link.listen)
        writer.write(b"a")
        assert await asyncio.wait_for(reader.readexactly(1), 60) == b"a"
        link.silence()
        writer.write(b"bc")
        reading = asyncio.create_task(reader.readexactly(2))
        done, _ = await asyncio.wait({reading}, timeout=0.2)
        assert not done
        link.heal()
        assert await asyncio.wait_for(reading, 60) == b"bc"
        writer.close()


async def test_a_slow_link_takes_its_time() -> None:
    async with echoing() as link:
        link.slow(10_000)
        reader, writer = await asyncio.open_connection(*link.listen)
        began = asyncio.get_running_loop().time()
        writer.write(bytes(2_000))
        await asyncio.wait_for(reader.readexactly(2_000), 60)
        assert asyncio.get_running_loop().time() - began >= 0.4, "there and back, at 10 kB/s"
        writer.close()
