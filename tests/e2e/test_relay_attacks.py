"""What strangers try at a relay with credentials, and what it answers: the table of docs/reference/relay-attacks.md.

`pytest -rP` prints the table. A row that is not on the page, or is there in other words, fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import msgspec
import pytest

from deploy.setup_env import ROOT
from paramserver.client import RelayClient, publish
from paramserver.core.handshake import NONCE_BYTES, Opening, key_id
from paramserver.credentials.authority import Authority
from paramserver.credentials.fleet import Fleet
from paramserver.data import frames
from paramserver.data.frames import Greeting, LinkBroken
from paramserver.data.secured import MAGIC, Challenge, DataAccess, Hello
from paramserver.data.tcp import TcpLink
from paramserver.data.transport import Source
from protos.access.credentials import CREDENTIALS_VARIABLE, Credentials
from protos.access.fleet import Identity
from protos.errors import LaminarError
from tests.support.engine_port import RawEngine, address_of, asked, echo
from tests.support.fleet_credentials import authority_of, write_holder
from tests.support.relays import Relays, until
from tests.support.secured_relay import client_context, in_thread
from tests.support.weights import source_of, weights

pytestmark = pytest.mark.slow

MODEL = "policy"
FETCH = Greeting("fetch", MODEL, 1, "stranger")


@dataclass(frozen=True, slots=True)
class Scene:
    """A relay at `address`, its port for bytes at `data`, for metrics at `metrics`, its port in front of an engine at
    `engine`, and its fleet; `scratch` is for strangers' credentials."""

    address: str
    data: str
    metrics: str
    engine: str
    fleet: Path
    scratch: Path

    def client(self, holder: str) -> RelayClient:
        return RelayClient(self.address, timeout_s=60.0, credentials=Credentials(self.fleet / holder))

    def anywhere(self, answer: str) -> str:
        """The answer without this run's addresses."""
        return answer.replace(self.address, "HOST:PORT").replace(self.data, "HOST:PORT")

    def stranger(self, name: str, issuer: Authority, **options: object) -> Path:
        return write_holder(self.scratch / name, issuer, Identity("admin", "a"), trusts=self.fleet, **options)  # type: ignore[arg-type]


Attempt = Callable[[Scene], Awaitable[str]]


async def _handshake(scene: Scene, context: ssl.SSLContext) -> str:
    """gRPC's server sends no alert, whatever was wrong: its log has the reason."""
    met = await in_thread(scene.address, context)
    return met if met == "served" else "the connection ends in its handshake"


async def no_certificate(scene: Scene) -> str:
    return await _handshake(scene, client_context(scene.fleet))


async def foreign(scene: Scene) -> str:
    issuer = Authority.new(datetime.datetime.now(datetime.UTC))
    return await _handshake(scene, client_context(scene.fleet, scene.stranger("foreign", issuer)))


async def expired(scene: Scene) -> str:
    holder = scene.stranger("expired", authority_of(scene.fleet), days_ago=31)
    return await _handshake(scene, client_context(scene.fleet, holder))


async def downgraded(scene: Scene) -> str:
    context = client_context(scene.fleet, scene.fleet / "admin", most=ssl.TLSVersion.TLSv1_1)
    return await _handshake(scene, context)


async def plaintext(scene: Scene) -> str:
    async with RelayClient(scene.address, timeout_s=60.0) as client:
        return await _refused(client.status())


async def silent_connections(scene: Scene) -> str:
    host, _, port = scene.address.rpartition(":")
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
    async with scene.client("reader") as client:
        await client.status()
    for reader, writer in streams:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60.0) == b""
        writer.close()
    return "a reader's call is answered meanwhile, and the relay closes them after 3 s"


async def reader_publishes(scene: Scene) -> str:
    async with scene.client("reader") as client:
        return await _refused(publish(client, MODEL, source_of(weights(1)), step=1, run="r"))


async def reader_locates(scene: Scene) -> str:
    async with scene.client("reader") as client:
        answer = await _refused(client.master_of("typo"))
        assert [model.model for model in (await client.status()).models] == [MODEL]
        return answer


async def gateway_drops(scene: Scene) -> str:
    async with scene.client("gateway") as client:
        return await _refused(client.drop(MODEL))


async def trainer_drains(scene: Scene) -> str:
    async with scene.client("trainer") as client:
        return await _refused(client.drain())


async def relay_adopts(scene: Scene) -> str:
    async with scene.client("relay") as client:
        return await _refused(client.adopt())


async def unknown_method(scene: Scene) -> str:
    async with scene.client("admin") as client:
        call = client._connection.channel().unary_unary("/laminar.v1.Relay/Shutdown")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"")
        return refused.value.code().name


async def metrics_in_the_clear(scene: Scene) -> str:
    async with httpx.AsyncClient(timeout=60.0) as http:
        assert (await http.get(f"http://{scene.metrics}/healthz")).text == "ok\n"
        answer = await http.get(f"http://{scene.metrics}/metrics")
    return f"{answer.status_code}: {answer.text.strip()}"


async def metrics_without_certificate(scene: Scene) -> str:
    return await _metrics(scene, client_context(scene.fleet))


async def metrics_by_a_foreigner(scene: Scene) -> str:
    issuer = Authority.new(datetime.datetime.now(datetime.UTC))
    return await _metrics(scene, client_context(scene.fleet, scene.stranger("foreign-at-metrics", issuer)))


async def _metrics(scene: Scene, context: ssl.SSLContext) -> str:
    async with httpx.AsyncClient(timeout=60.0, verify=context) as http:
        try:
            return (await http.get(f"https://{scene.metrics}/metrics")).text
        except (httpx.TransportError, ssl.SSLError):
            return "the connection ends in its handshake"


async def bytes_in_the_clear(scene: Scene) -> str:
    return await asyncio.to_thread(_greeted, scene, FETCH, None)


async def bytes_with_another_key(scene: Scene) -> str:
    Fleet.init(scene.scratch / "other", (), 30)
    return await asyncio.to_thread(_greeted, scene, FETCH, DataAccess(Credentials(scene.scratch / "other" / "admin")))


async def bytes_for_another_model(scene: Scene) -> str:
    greeting = Greeting("fetch", "critic", 1, "stranger")
    return await asyncio.to_thread(_greeted, scene, greeting, DataAccess(Credentials(scene.fleet / "relay")))


async def relay_writes(scene: Scene) -> str:
    access = DataAccess(Credentials(scene.fleet / "relay"), tls=True)
    return await asyncio.to_thread(_greeted, scene, Greeting("write", MODEL, 1, "stranger", token="guess"), access)


async def greeting_is_replayed(scene: Scene) -> str:
    """With the proof of a connection before, whose requester's nonce is repeated, too."""
    earlier: list[bytes] = []

    def keep(body: bytes, proof: bytes) -> tuple[bytes, bytes]:
        earlier.append(proof)
        return body, earlier[0]

    await asyncio.to_thread(_by_hand, scene, lambda body, proof: (keep(body, proof)[0], bytes(len(proof))))
    return await asyncio.to_thread(_by_hand, scene, keep)


async def greeting_is_changed(scene: Scene) -> str:
    return await asyncio.to_thread(_by_hand, scene, lambda body, proof: (body.replace(b"policy", b"critic"), proof))


async def greeting_is_oversized(scene: Scene) -> str:
    return await asyncio.to_thread(
        _by_hand, scene, lambda body, proof: (body + b" " * frames.GREETING_BYTES_MAX, proof)
    )


async def engine_in_the_clear(scene: Scene) -> str:
    return await _at_the_engine(scene, functools.partial(_in_the_clear, scene.engine))


async def engine_without_certificate(scene: Scene) -> str:
    return await _at_the_engine(scene, lambda: asked(scene.engine, None, scene.fleet))


async def engine_by_a_foreigner(scene: Scene) -> str:
    issuer = Authority.new(datetime.datetime.now(datetime.UTC))
    holder = scene.stranger("foreign-at-engine", issuer)
    return await _at_the_engine(scene, lambda: asked(scene.engine, holder, scene.fleet))


async def engine_by_a_trainer(scene: Scene) -> str:
    return await _at_the_engine(scene, lambda: asked(scene.engine, scene.fleet / "trainer", scene.fleet))


async def engine_by_an_engine_host(scene: Scene) -> str:
    return await _at_the_engine(scene, lambda: asked(scene.engine, scene.fleet / "engine-host", scene.fleet))


async def _at_the_engine(scene: Scene, ask: Callable[[], str]) -> str:
    """What became of a request, and by what the relay counts it as refused."""

    async def counted() -> Mapping[str, int]:
        async with scene.client("reader") as client:
            return (await client.status()).engine_ports[0].refused

    before = await counted()
    if await asyncio.to_thread(ask) == "served":
        return "served"

    async def grown() -> list[str]:
        return [reason for reason, times in (await counted()).items() if times > before[reason]]

    [reason] = await until(grown, "the relay has counted it")
    return f"the connection ends, and counts as refused by `{reason}`"


def _in_the_clear(url: str) -> str:
    with socket.create_connection(address_of(url), timeout=60.0) as sock:
        sock.sendall(b"POST /collective_rpc HTTP/1.1\r\nHost: engine\r\nContent-Length: 0\r\n\r\n")
        return "served" if b"HTTP/1" in sock.recv(1 << 10) else "closed"


def _greeted(scene: Scene, greeting: Greeting, access: DataAccess | None) -> str:
    with pytest.raises(LaminarError) as refused:
        TcpLink(Source("a", scene.data), greeting, silence_s=60.0, access=access).close()
    return refused.value.message


def _by_hand(scene: Scene, change: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> str:
    """A peer that knows the key, and whose greeting and proof are changed on their way."""
    key, nonce = Credentials(scene.fleet / "relay").material.fleet_keys[0], bytes(NONCE_BYTES)
    hello = msgspec.json.encode(Hello(nonce, [key_id(key)]))
    with frames.connect(scene.data, 60.0) as sock:
        frames.send_all(sock, MAGIC + len(hello).to_bytes(4, "big") + hello)
        header = frames.receive_header(sock)
        challenge = frames.receive_json(sock, header.length, Challenge)
        body = msgspec.json.encode(msgspec.structs.replace(FETCH, to=scene.data))
        body, proof = change(body, Opening("mac", nonce, challenge.nonce).requester_proof(key, body))
        with contextlib.suppress(LinkBroken):  # it ends before it has taken all in
            frames.send_all(sock, len(body).to_bytes(4, "big") + body + proof)
        try:
            header = frames.receive_header(sock)
        except LinkBroken:
            return "the connection ends"
        return frames.receive_refusal(sock, header).message


async def _refused(work: Awaitable[object]) -> str:
    with pytest.raises(LaminarError) as refused:
        await work
    return f"{refused.value.grpc_status}: {refused.value.message}"


ATTEMPTS: dict[str, Attempt] = {
    "gRPC without a certificate": no_certificate,
    "gRPC with an administrator's certificate of another CA": foreign,
    "gRPC with an administrator's certificate that has expired": expired,
    "gRPC over TLS 1.1": downgraded,
    "gRPC in the clear": plaintext,
    "300 connections for gRPC that say nothing": silent_connections,
    "a method that does not exist": unknown_method,
    "a reader publishes": reader_publishes,
    "a reader looks for the master of a model that there is not": reader_locates,
    "a gateway drops a model": gateway_drops,
    "a trainer drains a relay": trainer_drains,
    "a relay adopts a registry": relay_adopts,
    "metrics in the clear": metrics_in_the_clear,
    "metrics without a certificate": metrics_without_certificate,
    "metrics with an administrator's certificate of another CA": metrics_by_a_foreigner,
    "bytes in the clear": bytes_in_the_clear,
    "bytes with the fleet key of another fleet": bytes_with_another_key,
    "bytes of a model that there is not": bytes_for_another_model,
    "a relay writes a version, over TLS": relay_writes,
    "a greeting with the proof of an earlier connection": greeting_is_replayed,
    "a greeting whose model was changed on its way": greeting_is_changed,
    "a greeting that is too long": greeting_is_oversized,
    "an engine, in the clear": engine_in_the_clear,
    "an engine, without a certificate": engine_without_certificate,
    "an engine, with an administrator's certificate of another CA": engine_by_a_foreigner,
    "a trainer calls an engine": engine_by_a_trainer,
    "what runs beside an engine calls another host's": engine_by_an_engine_host,
}


@pytest.fixture
async def scene(relays: Relays, fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.delenv(CREDENTIALS_VARIABLE, raising=False)
    async with RawEngine(echo) as engine:
        flags = ("--metrics-port=0", "--credentials", str(fleet / "relay"), f"--engine=embedded={engine.url}")
        daemon = await asyncio.to_thread(relays.start, "a", *flags)
        async with RelayClient(
            daemon.ready["grpc"], timeout_s=60.0, credentials=Credentials(fleet / "reader")
        ) as reader:
            [port] = (await reader.status()).engine_ports
        found = Scene(daemon.ready["grpc"], daemon.ready["data"], daemon.ready["metrics"], port.url, fleet, tmp_path)
        async with found.client("trainer") as trainer:
            await (await publish(trainer, MODEL, source_of(weights(1)), step=1, run="r")).wait_sealed(60.0)
        yield found
        async with found.client("reader") as reader:
            assert [one.version for one in await reader.versions(MODEL)] == [1], "it serves as before"
        assert engine.connections == 0, "the engine has heard of nobody"
        assert "Handshake failed" not in daemon.log(), "gRPC's own lines, one for each stranger"
        assert await asyncio.to_thread(asked, port.url, fleet / "gateway", fleet) == "served"


async def test_the_page_has_what_each_attempt_is_answered(scene: Scene) -> None:
    page = (ROOT / "docs/reference/relay-attacks.md").read_text()
    rows = [f"| {what} | {scene.anywhere(await attempt(scene))} |" for what, attempt in ATTEMPTS.items()]
    print("\n".join(["| attempt | answer |", "|---|---|", *rows]))
    assert [row for row in rows if row not in page] == []
