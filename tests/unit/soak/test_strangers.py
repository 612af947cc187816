"""Strangers who are refused are counted, and one that is let in fails the run."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from paramserver.data import engine_ports
from paramserver.data.engine_ports import EnginePort
from paramserver.data.secured import DataAccess
from protos.access.credentials import CREDENTIALS_VARIABLE, Credentials
from protos.access.tls import FleetTls
from tests.soak import attempts
from tests.soak.access import Access
from tests.soak.judge import Judge
from tests.soak.places import EngineDoor, Places
from tests.soak.strangers import Strangers
from tests.support.engine_port import RawEngine, address_of
from tests.support.hops import CONTENT, Host
from tests.support.secured_relay import secured

pytestmark = pytest.mark.slow

OPEN_TO_ANYBODY, AWAY = web.HTTPOk, web.HTTPServiceUnavailable
RELAY_HOST = "127.0.1.1"


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """Made by the commands that a soak runs, once: nothing here changes it."""
    access = Access(tmp_path_factory.mktemp("access"))
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(CREDENTIALS_VARIABLE, raising=False)
        asyncio.run(access.make({"relay-1": [RELAY_HOST]}, ["gateway-1"]))
        yield access


async def tried(access: Access, places: Places) -> Judge:
    """One round at these places."""
    judge = Judge(1)
    await Strangers(access, places, judge).once()
    return judge


async def tried_at_a_gateway(access: Access, answer: type[web.HTTPException]) -> Judge:
    """One round at a gateway that answers like that, and at a relay with credentials."""

    async def sample(_: web.Request) -> web.Response:
        return web.Response(status=answer.status_code)

    app = web.Application()
    app.router.add_post("/experience/sample", sample)
    async with TestServer(app) as gateway, secured(Credentials(access.of("relay-1"))) as (_, relay):
        url = str(gateway.make_url("")).rstrip("/")
        return await tried(access, Places(relays={"relay-1": relay}, gateways={"gateway-1": url}))


async def test_who_is_refused_is_counted(access: Access) -> None:
    judge = await tried_at_a_gateway(access, web.HTTPForbidden)
    assert not judge.failures
    assert judge.counts["strangers refused"] == 3, "nobody's handshake ends without a word"


async def test_a_fault_says_nothing(access: Access) -> None:
    judge = await tried_at_a_gateway(access, AWAY)
    assert (judge.failures, judge.counts["strangers refused"]) == ({}, 1)


async def test_one_that_is_let_in_fails_the_run(access: Access) -> None:
    judge = await tried_at_a_gateway(access, OPEN_TO_ANYBODY)
    assert judge.failures == {"stranger let in": 2}
    assert "stranger let in: nobody, at gateway-1" in judge.findings


# ---- at a relay's port for bytes


@contextlib.contextmanager
def data_port(access: DataAccess | None, *, filled: bool = True) -> Iterator[dict[str, str]]:
    directory = Path(tempfile.mkdtemp(prefix="laminar-data-", dir="/dev/shm"))
    host = Host(directory / "host", len(CONTENT), access=access)
    try:
        if filled:
            host.fill()
        yield {"relay-1": host.source.address}
    finally:
        host.close()
        shutil.rmtree(directory)


async def test_who_has_no_key_of_the_fleet_reads_no_bytes(access: Access) -> None:
    with data_port(DataAccess(Credentials(access.of("relay-1")))) as places:
        judge = await tried(access, Places(data=places))
    assert not judge.failures
    assert judge.counts == {
        "strangers refused": 2,
        "refused, of them: nobody that fetches, at relays": 1,
        "refused, of them: another fleet's administrator that fetches, at relays": 1,
    }


async def test_a_port_for_bytes_that_answers_about_a_version_has_let_in(access: Access) -> None:
    """By the bytes, or by words about them."""
    with data_port(None) as places:
        judge = await tried(access, Places(data=places))
    assert judge.findings == ["stranger let in: nobody that fetches, at relay-1"]
    assert not judge.counts, "who speaks another protocol there is not refused by it"


# ---- at engines, behind relays


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As an engine does, whatever it is asked."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def engine_door(tls: FleetTls) -> AsyncIterator[tuple[RawEngine, dict[str, EngineDoor]]]:
    async with RawEngine(answers) as engine:
        listener = engine_ports.listen("127.0.0.1", 0)
        port = EnginePort("engine-1", engine.url, listener, RELAY_HOST, tls)
        await port.serve()
        try:
            yield engine, {"engine-1": EngineDoor(address_of(port.url)[1], RELAY_HOST)}
        finally:
            await port.close()


async def test_nobody_and_a_trainer_reach_no_engine(access: Access) -> None:
    async with engine_door(engine_ports.tls_of(Credentials(access.of("relay-1")))) as (engine, places):
        judge = await tried(access, Places(engines=places))
        assert engine.connections == 0
    assert not judge.failures
    assert judge.counts == {
        "strangers refused": 3,
        **{
            f"refused, of them: {who}, at engines": 1
            for who in ("nobody that loads, in the clear", "nobody that loads", "a trainer that loads")
        },
    }


async def test_a_trainer_that_an_engine_answers_was_let_in(access: Access) -> None:
    everybody = FleetTls(Credentials(access.of("relay-1")), serving=True, refusal=lambda peer: "")
    async with engine_door(everybody) as (_, places):
        judge = await tried(access, Places(engines=places))
    assert judge.findings == ["stranger let in: a trainer that loads, at engine-1"]
    assert judge.counts["strangers refused"] == 2


async def test_an_engine_that_is_reached_in_the_clear_has_let_in(access: Access) -> None:
    async with RawEngine(answers) as engine:
        door = EngineDoor(address_of(engine.url)[1], RELAY_HOST)
        judge = await tried(access, Places(engines={"engine-1": door}))
    assert judge.findings == ["stranger let in: nobody that loads, in the clear, at engine-1"]


async def test_an_engine_that_asks_for_no_certificate_has_let_in(access: Access) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(access.of("relay-1") / "cert.pem", access.of("relay-1") / "key.pem")
    server = await asyncio.start_server(answers, "127.0.0.1", 0, ssl=context)
    async with server:
        door = EngineDoor(server.sockets[0].getsockname()[1], RELAY_HOST)
        judge = await tried(access, Places(engines={"engine-1": door}))
    assert judge.failures == {"stranger let in": 2}, "with a certificate, and without"


async def test_a_relay_that_is_away_says_nothing(access: Access) -> None:
    async with engine_door(engine_ports.tls_of(Credentials(access.of("relay-1")))) as (_, places):
        pass
    judge = await tried(access, Places(engines=places))
    assert (judge.failures, judge.counts) == ({}, {})


async def test_a_stranger_that_meets_another_relay_is_not_refused_by_it(access: Access) -> None:
    tls = attempts.tls_of(Credentials(access.of("trainer")))
    async with engine_door(engine_ports.tls_of(Credentials(access.of("relay-1")))) as (_, places):
        with pytest.raises(ssl.SSLCertVerificationError):
            await attempts.load(EngineDoor(places["engine-1"].port, "127.0.1.2"), tls)


async def test_credentials_are_for_their_holders_alone(access: Access) -> None:
    held = {name: Credentials(access.of(name)).material.identity for name in ("relay-1", "gateway-1", "engine-host")}
    assert {name: str(identity) for name, identity in held.items()} == {
        "relay-1": "relay relay-1",
        "gateway-1": "gateway gateway-1",
        "engine-host": "engine-host engine-host",
    }
    assert access.key_file.stat().st_mode & 0o777 == 0o600
    assert await asyncio.to_thread(access.key_file.read_text) == (
        f"agent runner {access.keys['runner']}\ntrainer trainer {access.keys['trainer']}\n"
    )
