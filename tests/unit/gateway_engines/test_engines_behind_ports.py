"""An engine behind a relay's port of TLS: to the gateway it is the engine itself, and nobody else stands in for it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from gateway.core.types import SamplingParams
from gateway.engines.base import EngineAdapter, EngineChunk, EngineFailed, StreamCut, engine_tls, system_tls
from gateway.engines.connections import until_broken
from gateway.engines.http import HttpAdapter
from gateway.engines.kinds import Guarded, connect
from gateway.faultkit.script import Cut, CutKind, scripted
from paramserver.credentials.authority import Authority
from paramserver.credentials.fleet import Fleet
from protos.access.credentials import Credentials
from protos.access.fleet import Identity
from protos.access.tls import FleetTls
from tests.support.adapters import lent
from tests.support.engine_port import PATIENCE_S, RawEngine, echo, engine_port
from tests.support.fleet_credentials import authority_of, write_holder
from tests.support.scripted_engine import MODEL, ScriptedEngine, pass_time, until
from tests.unit.gateway_engines.test_vllm_adapter import PROMPT, REASONS

STALL_S = 60.0


@contextlib.asynccontextmanager
async def adapter(url: str, credentials: Credentials | None) -> AsyncIterator[EngineAdapter]:
    found = connect("vllm", url, lent(MODEL, stall_timeout_s=STALL_S, tls=engine_tls(credentials)))
    try:
        yield found
    finally:
        await found.close()


async def generate(found: EngineAdapter) -> list[EngineChunk]:
    async with found.generate(PROMPT, SamplingParams(max_tokens=8), "r1", "s1") as chunks:
        return [chunk async for chunk in chunks]


async def posted(found: EngineAdapter) -> None:
    """A POST without a GET before it, which a load would begin with."""
    assert isinstance(found, Guarded)
    assert isinstance(found._adapter, HttpAdapter)
    await found._adapter._http.post("/resume")


async def passed(found: EngineAdapter) -> bytes:
    answer = await found.pass_on("/v1/completions", b'{"prompt": [5], "max_tokens": 2}', stall_timeout_s=STALL_S)
    try:
        status, _ = await answer.head()
        body = b""
        while some := await answer.some():
            body += some
        return b"%d " % status + body
    finally:
        answer.close()


# -- the engine itself


async def test_turns_loads_probes_and_text_pass(fleet: Path) -> None:
    async with (
        ScriptedEngine() as engine,
        engine_port(fleet / "relay", engine.url) as port,
        adapter(port.url, Credentials(fleet / "gateway")) as found,
    ):
        chunks = await generate(found)
        assert [t for c in chunks for t in c.token_ids] == scripted(PROMPT, 8)[0]
        await found.report()
        await found.limits()
        assert await found.load(Path("/snapshots/3"), 3, "digest-3") > 0
        assert await found.weight_version() == "3"
        assert (await passed(found)).startswith(b"200 ")
        assert await found.tokenize("text") is None
        assert port.statistics().accepted > 0
    assert port.statistics().open == 0


@pytest.mark.parametrize(("kind", "reason"), REASONS.items())
async def test_streams_are_cut_as_they_are_without_a_port(fleet: Path, kind: CutKind, reason: str) -> None:
    async with (
        ScriptedEngine(always=Cut(kind, 4)) as engine,
        engine_port(fleet / "relay", engine.url) as port,
        adapter(port.url, Credentials(fleet / "gateway")) as found,
    ):
        turn = asyncio.create_task(generate(found))
        if reason == "stalled":
            await until(lambda: engine.requests, "the request")
            await until(lambda: kind == "silent" or engine.said_tokens == 4, "what comes before")
            for _ in range(100):  # what was said passes through two loops' callbacks
                await asyncio.sleep(0.001)
            pass_time(STALL_S)
        with pytest.raises(StreamCut) as cut:
            await turn
        assert cut.value.reason == reason


async def test_a_turn_that_is_left_is_aborted_in_the_engine(fleet: Path) -> None:
    async with (
        ScriptedEngine(hold_at=2) as engine,
        engine_port(fleet / "relay", engine.url) as port,
        adapter(port.url, Credentials(fleet / "gateway")) as found,
    ):
        async with found.generate(PROMPT, SamplingParams(max_tokens=8), "r1", "s1") as chunks:
            await anext(aiter(chunks))
        await until(lambda: engine.requests[0].left, "the engine to hear of it")
        engine.go.set()


async def test_the_tether_breaks_when_the_engine_dies(fleet: Path) -> None:
    async with ScriptedEngine() as engine, engine_port(fleet / "relay", engine.url) as port:
        tether = asyncio.create_task(until_broken(port.url, engine_tls(Credentials(fleet / "gateway"))))
        await until(lambda: port.statistics().open == 1, "the tether")
        await engine.die()
        assert await asyncio.wait_for(tether, PATIENCE_S)


async def test_an_engine_that_is_away_does_not_answer(fleet: Path) -> None:
    async with RawEngine(echo) as engine:
        pass
    async with (
        engine_port(fleet / "relay", engine.url) as port,
        adapter(port.url, Credentials(fleet / "gateway")) as found,
    ):
        with pytest.raises(EngineFailed, match="GET https://127"):
            await found.report()
        with pytest.raises(EngineFailed, match="POST https://127"):
            await posted(found)
        with pytest.raises(StreamCut) as cut:
            await generate(found)
        assert cut.value.reason == "reset"


async def test_a_new_connection_has_the_certificates_of_its_time(own_fleet: Path) -> None:
    relay, gateway = Credentials(own_fleet / "relay"), Credentials(own_fleet / "gateway")
    async with (
        ScriptedEngine() as engine,
        engine_port(relay, engine.url) as port,
        adapter(port.url, gateway) as found,
    ):
        for _ in range(3):  # after the last one nothing of the first CA is left
            Fleet(own_fleet).rotate(30)
            for either in (relay, gateway):
                either.refresh()
            before = port.statistics().accepted
            assert await found.load(Path("/snapshots/3"), 3, "digest-3") > 0
            assert port.statistics().accepted > before
        assert sum(port.statistics().refused.values()) == 0


# -- somebody else

Served = Callable[[Path], contextlib.AbstractAsyncContextManager[str]]


@contextlib.asynccontextmanager
async def served_with(holder: Path) -> AsyncIterator[str]:
    """Something that takes everybody, with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(holder / "cert.pem", holder / "key.pem")
    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def impostor(what: str, fleet: Path, directory: Path) -> Path:
    issuer, relay = authority_of(fleet), Identity("relay", "r")
    if what == "a foreign relay":
        return write_holder(directory, Authority.new(datetime.datetime.now(datetime.UTC)), relay, trusts=fleet)
    if what == "a trainer":
        return write_holder(directory, issuer, Identity("trainer", "t"), trusts=fleet)
    if what == "a relay of another host":
        return write_holder(directory, issuer, relay, trusts=fleet, hosts=("elsewhere",))
    return write_holder(directory, issuer, relay, trusts=fleet, days_ago=31)


CALLS: dict[str, Callable[[EngineAdapter], Awaitable[object]]] = {
    "a probe": lambda found: found.report(),
    "a step of a load": posted,
    "a turn": generate,
    "text": passed,
}


@pytest.mark.parametrize("what", ["a foreign relay", "a trainer", "a relay of another host", "an expired relay"])
async def test_nobody_but_a_relay_of_the_fleet_at_its_address_is_called(fleet: Path, tmp_path: Path, what: str) -> None:
    async with (
        served_with(impostor(what, fleet, tmp_path / "impostor")) as url,
        adapter(url, Credentials(fleet / "gateway")) as found,
    ):
        for call in CALLS.values():
            with pytest.raises((EngineFailed, StreamCut), match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
                await call(found)
        assert not await until_broken(url, engine_tls(Credentials(fleet / "gateway")))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_the_role_is_part_of_the_handshake(fleet: Path, loop: str) -> None:
    """A certificate that could serve, and is not of a role that is taken: in either loop that daemons run on."""

    async def ask() -> None:
        async with served_with(fleet / "relay") as url:
            tls = FleetTls(Credentials(fleet / "gateway"), serving=False, refusal=lambda peer: f"{peer} is not taken")
            found = connect("vllm", url, lent(MODEL, tls=tls.context))
            try:
                for call in CALLS.values():
                    with pytest.raises((EngineFailed, StreamCut), match="relay relay is not taken"):
                        await call(found)
            finally:
                await found.close()

    if loop == "asyncio":
        await ask()
    else:
        import uvloop

        await asyncio.to_thread(uvloop.run, ask())


async def test_without_credentials_the_hosts_cas_decide(fleet: Path) -> None:
    assert engine_tls(None) is system_tls
    async with (
        ScriptedEngine() as engine,
        engine_port(fleet / "relay", engine.url) as port,
        adapter(port.url, None) as found,
    ):
        with pytest.raises(EngineFailed, match="CERTIFICATE_VERIFY_FAILED"):
            await found.report()
        assert engine.calls == []
