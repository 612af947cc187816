"""Who gets through an engine port, what passes through it, and what it takes to hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import logging
import os
import random
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest

from paramserver.credentials.authority import Authority
from paramserver.credentials.fleet import Fleet
from paramserver.data import engine_ports, splice
from paramserver.data.engine_ports import EnginePort
from protos.access.credentials import Credentials
from protos.access.fleet import FLEET_ROLES, Identity
from protos.errors import Conflict
from tests.support.engine_port import (
    PATIENCE_S,
    HalfCloser,
    RawEngine,
    address_of,
    asked,
    called,
    context_of,
    echo,
    engine_port,
)
from tests.support.fleet_credentials import authority_of, write_holder
from tests.support.scripted_engine import pass_time, until

MAY = {"gateway", "admin"}
MUCH = os.urandom(8 << 20)


@pytest.fixture
async def engine() -> AsyncIterator[RawEngine]:
    async with RawEngine(echo) as found:
        yield found


@pytest.fixture
async def port(fleet: Path, engine: RawEngine) -> AsyncIterator[EnginePort]:
    async with engine_port(fleet / "relay", engine.url) as found:
        yield found


async def served(port: EnginePort, fleet: Path) -> bool:
    return await asyncio.to_thread(asked, port.url, fleet / "gateway", fleet) == "served"


# -- who gets through


@pytest.mark.parametrize("role", FLEET_ROLES)
async def test_roles_are_checked_before_the_engine_hears_of_it(
    fleet: Path, port: EnginePort, engine: RawEngine, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = await asyncio.to_thread(asked, port.url, fleet / role, fleet)
    assert (found == "served") == (role in MAY)
    assert engine.connections == (role in MAY)
    assert port.statistics().refused["role"] == (role not in MAY)
    said = f"the certificate of {role} {role} does not allow: call the engines beside a relay"
    assert (said in caplog.text) == (role not in MAY)
    assert await served(port, fleet)


async def test_strangers_end_in_the_handshake(fleet: Path, port: EnginePort, engine: RawEngine, tmp_path: Path) -> None:
    gateway = Identity("gateway", "g")
    foreign = Authority.new(datetime.datetime.now(datetime.UTC))
    strangers = [
        None,
        write_holder(tmp_path / "foreign", foreign, gateway, trusts=fleet),
        write_holder(tmp_path / "expired", authority_of(fleet), gateway, trusts=fleet, days_ago=31),
    ]
    for number, holder in enumerate(strangers, 1):
        assert await asyncio.to_thread(asked, port.url, holder, fleet) != "served", holder
        assert port.statistics().refused["handshake"] == number
    older = await asyncio.to_thread(asked, port.url, fleet / "gateway", fleet, ssl.TLSVersion.TLSv1_2)
    assert "PROTOCOL_VERSION" in older
    odd = write_holder(tmp_path / "odd", authority_of(fleet), Identity("root", "a"), trusts=fleet)  # type: ignore[arg-type]
    assert await asyncio.to_thread(asked, port.url, odd, fleet) != "served"
    assert port.statistics().refused["role"] == 1
    assert engine.connections == 0
    assert await served(port, fleet)


async def test_http_in_the_clear_gets_nothing(fleet: Path, port: EnginePort, engine: RawEngine) -> None:
    reader, writer = await asyncio.open_connection(*address_of(port.url))
    writer.write(b"POST /collective_rpc HTTP/1.1\r\nHost: e\r\nContent-Length: 0\r\n\r\n")
    assert b"HTTP" not in await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    assert (engine.connections, port.statistics().refused["handshake"]) == (0, 1)
    assert await served(port, fleet)


def hello(fleet: Path) -> bytes:
    """The first bytes of an honest caller."""
    outgoing = ssl.MemoryBIO()
    tls = context_of(fleet / "gateway", fleet).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("seed", range(8))
async def test_what_is_no_tls_costs_its_connection_alone(
    fleet: Path, port: EnginePort, engine: RawEngine, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance, honest = random.Random(seed), hello(fleet)
    said = bytearray(honest)
    match seed % 4:
        case 0:
            said = bytearray(chance.randbytes(chance.randrange(1, 1 << 16)))
        case 1:
            said = said[: chance.randrange(1, len(said))] + chance.randbytes(1 << 10)
        case 2:
            said[chance.randrange(5, len(said))] ^= 1 << chance.randrange(8)
            said += honest  # a second one in its place
        case 3:
            said = bytearray(b"\x17\x03\x03\x40\x00" + chance.randbytes(1 << 14))  # data before any handshake
    reader, writer = await asyncio.open_connection(*address_of(port.url))
    writer.write(said)
    writer.write_eof()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    await until(lambda: port.statistics().handshakes == 0, "its end")
    assert engine.connections == 0
    assert await served(port, fleet)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_bytes_that_are_changed_behind_the_handshake_end_the_connection(
    fleet: Path, port: EnginePort, engine: RawEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with HalfCloser(port.url, context_of(fleet / "gateway", fleet)) as caller:
        caller.write(b"before")
        await until(lambda: engine.open == 1, "the engine's connection")
        caller._writer.write(b"\x17\x03\x03\x00\x40" + bytes(64))  # a record under another key
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await caller.read()
    await until(lambda: engine.open == 0 and port.statistics().open == 0, "both ends")
    assert await served(port, fleet)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_port_that_is_only_tried_is_no_refusal(port: EnginePort, caplog: pytest.LogCaptureFixture) -> None:
    """As probes do that connect and leave."""
    caplog.set_level(logging.WARNING)
    _, writer = await asyncio.open_connection(*address_of(port.url))
    await until(lambda: port.statistics().handshakes == 1, "the connection")
    writer.close()
    await until(lambda: port.statistics().handshakes == 0, "its end")
    assert (sum(port.statistics().refused.values()), caplog.text) == (0, "")


# -- what passes


async def test_bytes_pass_both_ways_at_once_and_each_direction_ends_by_itself(fleet: Path, port: EnginePort) -> None:
    def exchange() -> str:
        with called(port.url, fleet / "gateway", fleet) as sock:
            sock.settimeout(0.0)
            digest, sent, got = hashlib.sha256(), 0, 0
            while got < len(MUCH):
                try:
                    if sent < len(MUCH):
                        sent += sock.send(MUCH[sent : sent + (1 << 16)])
                except ssl.SSLWantWriteError:
                    pass
                try:
                    data = sock.recv(1 << 16)
                    got += len(data)
                    digest.update(data)
                except ssl.SSLWantReadError:
                    pass
            sock.settimeout(PATIENCE_S)
            sock.unwrap()  # its own last word; returns once the engine's has come
            return digest.hexdigest()

    assert await asyncio.to_thread(exchange) == hashlib.sha256(MUCH).hexdigest()
    await until(lambda: port.statistics().open == 0, "the connection's end")


async def test_no_piece_waits_for_an_acknowledgement_and_a_vanished_caller_is_noticed(
    fleet: Path, port: EnginePort
) -> None:
    """With Nagle's algorithm a token waits 40 ms for the acknowledgement of the one before."""
    _, writer = await asyncio.open_connection(*address_of(port.url), ssl=context_of(fleet / "gateway", fleet))
    await until(lambda: any(one._engine._connected for one in port._open), "the connection")
    [connection] = port._open
    for transport in (connection._transport, connection._engine.transport):
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert connection._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    writer.close()


async def test_an_engine_answers_a_caller_that_has_ended(fleet: Path) -> None:
    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.read()  # to its end
        writer.write(request[::-1])

    async with (
        RawEngine(late) as engine,
        engine_port(fleet / "relay", engine.url) as port,
        HalfCloser(port.url, context_of(fleet / "gateway", fleet)) as caller,
    ):
        caller.write(b"abc")
        caller.end()
        assert await caller.read() == b"cba"


async def test_a_caller_may_go_on_after_the_engine_has_ended(fleet: Path) -> None:
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def brief(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"enough")
        writer.write_eof()
        heard.set_result(await reader.read())

    async with RawEngine(brief) as engine, engine_port(fleet / "relay", engine.url) as port:
        async with HalfCloser(port.url, context_of(fleet / "gateway", fleet)) as caller:
            assert await caller.read() == b"enough"
            caller.write(b"one more thing")
            caller.end()
            assert await asyncio.wait_for(heard, PATIENCE_S) == b"one more thing"
        await until(lambda: port.statistics().open == 0, "the connection's end")


async def test_a_caller_that_does_not_read_holds_the_engine_back(fleet: Path) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for at in range(0, 4 * len(MUCH), 1 << 16):
            writer.write(MUCH[at % len(MUCH) :][: 1 << 16])
            await writer.drain()
            sent = at + (1 << 16)

    async with RawEngine(flood) as engine, engine_port(fleet / "relay", engine.url) as port:
        reader, writer = await asyncio.open_connection(
            *address_of(port.url), ssl=context_of(fleet / "gateway", fleet), limit=1 << 16
        )
        transport = cast(asyncio.Transport, writer.transport)
        transport.pause_reading()
        await until_still(lambda: sent)
        [connection] = port._open
        kept = connection._transport.get_write_buffer_size()
        assert sent < 4 * len(MUCH)
        assert kept < 1 << 20, "beside the kernel's buffers little waits"
        transport.resume_reading()
        digest, got = hashlib.sha256(), 0
        while data := await asyncio.wait_for(reader.read(1 << 20), PATIENCE_S):
            got += len(data)
            digest.update(data)
        assert (got, digest.hexdigest()) == (4 * len(MUCH), hashlib.sha256(4 * MUCH).hexdigest())
        writer.close()


async def test_an_engine_that_does_not_read_holds_the_caller_back(fleet: Path) -> None:
    go, read, sent = asyncio.Event(), hashlib.sha256(), 0

    async def lazy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        while data := await reader.read(1 << 16):
            read.update(data)

    async def send(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for at in range(0, 4 * len(MUCH), 1 << 16):
            writer.write(MUCH[at % len(MUCH) :][: 1 << 16])
            await writer.drain()
            sent = at + (1 << 16)
        writer.close()
        await writer.wait_closed()

    async with RawEngine(lazy) as engine, engine_port(fleet / "relay", engine.url) as port:
        _, writer = await asyncio.open_connection(*address_of(port.url), ssl=context_of(fleet / "gateway", fleet))
        sending = asyncio.create_task(send(writer))
        await until_still(lambda: sent)
        [connection] = port._open
        assert sent < 4 * len(MUCH)
        assert connection._engine.transport.get_write_buffer_size() < 1 << 20, (
            "beside the kernel's buffers little waits"
        )
        go.set()
        await asyncio.wait_for(sending, PATIENCE_S)
        await until(lambda: engine.open == 0, "the engine to have read to the end")
        assert read.hexdigest() == hashlib.sha256(4 * MUCH).hexdigest()


async def until_still(number: Callable[[], int]) -> None:
    """Waits until a number that grows, or shrinks, has stood still for two hundred rounds of the event loop with a
    pause in each: what passes through kernels and two loops' callbacks takes far fewer."""
    still, last = 0, 0
    while still < 200:
        await asyncio.sleep(0.001)
        now = number()
        still, last = (still + 1 if now and now == last else 0), now


async def test_who_breaks_off_does_so_at_the_other_end(fleet: Path) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"token")
        try:
            data = await reader.read()
        except ConnectionResetError:
            data = b""
        ended.put_nowait("ended" if not data else "said")

    async with RawEngine(listen) as engine, engine_port(fleet / "relay", engine.url) as port:
        reader, writer = await asyncio.open_connection(*address_of(port.url), ssl=context_of(fleet / "gateway", fleet))
        assert await asyncio.wait_for(reader.readexactly(5), PATIENCE_S) == b"token"
        writer.transport.abort()
        assert await asyncio.wait_for(ended.get(), PATIENCE_S) == "ended"
        await until(lambda: port.statistics().open == 0, "the connection's end")


async def test_what_an_engine_broke_off_is_not_given_out_as_ended(fleet: Path) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"half")
        await writer.drain()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset, as of a killed process
        writer.transport.abort()

    async with RawEngine(die) as engine, engine_port(fleet / "relay", engine.url) as port:
        assert await asyncio.to_thread(asked, port.url, fleet / "gateway", fleet) != "served"

        def read() -> str:
            with called(port.url, fleet / "gateway", fleet) as sock:
                sock.sendall(b"x")
                try:
                    while sock.recv(16):
                        pass
                except ssl.SSLError:
                    return "broken"
                return "ended"

        assert await asyncio.to_thread(read) == "broken"


async def test_an_engine_that_is_away_ends_the_connection(fleet: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with RawEngine(echo) as engine:
        pass
    async with engine_port(fleet / "relay", engine.url) as port:
        for _ in range(3):
            met = await asyncio.to_thread(asked, port.url, fleet / "gateway", fleet)
            assert met in ("closed", "reset", "eof")
        assert port.statistics().refused["engine"] == 3
        lines = [record for record in caplog.records if "does not accept" in record.getMessage()]
        assert len(lines) == 1, "one line for all of them"


# -- holding it up


async def test_a_slow_handshake_ends_after_its_time(fleet: Path, port: EnginePort, engine: RawEngine) -> None:
    slow = [await asyncio.open_connection(*address_of(port.url)) for _ in range(3)]
    slow[1][1].write(b"\x16\x03\x01")  # the beginning of a handshake
    await until(lambda: port.statistics().handshakes == 3, "the connections")
    assert await served(port, fleet)
    pass_time(splice.HANDSHAKE_S)
    for reader, writer in slow:
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()
    assert port.statistics().refused["handshake"] == 3
    assert await served(port, fleet)


async def test_silent_connections_make_way(fleet: Path, port: EnginePort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ports, "HANDSHAKES_MAX", 3)
    silent = [await asyncio.open_connection(*address_of(port.url)) for _ in range(5)]
    await until(lambda: port.statistics().refused["handshake"] == 2, "two that made way")
    assert port.statistics().handshakes == 3
    assert await served(port, fleet)
    for reader, writer in silent[:3]:
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()
    for _, writer in silent[3:]:
        writer.close()


async def test_many_that_come_at_once_make_way_too(
    fleet: Path, port: EnginePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted in one round of the event loop, before the first of them has a transport."""
    monkeypatch.setattr(engine_ports, "HANDSHAKES_MAX", 3)
    address = address_of(port.url)
    found = [socket.create_connection(address, PATIENCE_S) for _ in range(40)]  # the loop stands still meanwhile
    await until(lambda: port.statistics().refused["handshake"] == 37, "those that made way")
    assert port.statistics().handshakes == 3
    assert await served(port, fleet)
    for sock in found:
        sock.close()


async def test_more_connections_than_there_may_be_are_refused(fleet: Path, port: EnginePort) -> None:
    port._connections_max = 2
    context = context_of(fleet / "gateway", fleet)
    held = [await asyncio.open_connection(*address_of(port.url), ssl=context) for _ in range(2)]
    await until(lambda: port.statistics().open == 2, "both")
    assert not await served(port, fleet)
    assert port.statistics().refused["connections"] == 1
    for _, writer in held:
        writer.close()
    await until(lambda: port.statistics().open == 0, "room")
    assert await served(port, fleet)


async def test_a_connection_of_which_one_direction_ended_is_not_kept_for_ever(fleet: Path) -> None:
    go = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await go.wait()

    async with RawEngine(silent) as engine, engine_port(fleet / "relay", engine.url) as port:
        async with HalfCloser(port.url, context_of(fleet / "gateway", fleet)) as caller:
            caller.end()
            await until(lambda: any(one._ended for one in port._open), "the caller's last word")
            pass_time(splice.HALF_OPEN_S)
            await until(lambda: port.statistics().open == 0, "the connection's end")
        go.set()


async def test_closing_ends_every_connection(fleet: Path, engine: RawEngine) -> None:
    async with engine_port(fleet / "relay", engine.url) as port:
        silent = await asyncio.open_connection(*address_of(port.url))
        held = await asyncio.open_connection(*address_of(port.url), ssl=context_of(fleet / "gateway", fleet))
        await until(lambda: port.statistics().open and port.statistics().handshakes, "both")
    assert await asyncio.wait_for(silent[0].read(), PATIENCE_S) == b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):  # it was broken off
        assert await asyncio.wait_for(held[0].read(), PATIENCE_S) == b""
    for _, writer in (silent, held):
        writer.close()
    await until(lambda: engine.open == 0, "the engine's connection to end")


# -- rotation, ports


async def test_certificates_are_replaced_while_a_connection_stands(own_fleet: Path, engine: RawEngine) -> None:
    credentials = Credentials(own_fleet / "relay")
    async with engine_port(credentials, engine.url) as port:
        reader, writer = await asyncio.open_connection(
            *address_of(port.url), ssl=context_of(own_fleet / "gateway", own_fleet)
        )
        before = (own_fleet / "ca.pem").read_bytes()
        for _ in range(3):
            Fleet(own_fleet).rotate(30)
            credentials.refresh()
            assert await asyncio.to_thread(asked, port.url, own_fleet / "gateway", own_fleet) == "served"
        writer.write(b"still")
        assert await asyncio.wait_for(reader.readexactly(5), PATIENCE_S) == b"still"
        writer.close()
        assert (own_fleet / "ca.pem").read_bytes() != before
        withdrawn = write_holder(
            own_fleet / "old",
            Authority.new(datetime.datetime.now(datetime.UTC)),
            Identity("gateway", "g"),
            trusts=own_fleet,
        )
        assert await asyncio.to_thread(asked, port.url, withdrawn, own_fleet) != "served"


@pytest.mark.parametrize(
    ("soft", "hard", "ports", "raised", "each"),
    [
        (1024, 1 << 19, 1, 1 << 19, 1024),
        (1024, 2048, 1, 2048, 512),
        (1024, 1024, 4, 1024, 64),
        (1024, resource.RLIM_INFINITY, 2, 1 << 20, 1024),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2, resource.RLIM_INFINITY, 1024),
    ],
)
def test_ports_leave_files_to_the_rest_of_the_relay(
    soft: int, hard: int, ports: int, raised: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    assert engine_ports.connections_max(ports) == each
    assert limits[-1] == (raised, hard)


def test_a_port_that_is_taken_is_refused_with_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Conflict, match="for an engine") as refused:
        engine_ports.listen("127.0.0.1", taken.getsockname()[1])
    assert "@PORT" in refused.value.hint


async def test_the_ports_url_has_the_engines_path(fleet: Path) -> None:
    async with engine_port(fleet / "relay", "http://127.0.0.1:1/base") as port:
        assert port.url.startswith("https://127.0.0.1:")
        assert port.url.endswith("/base")
