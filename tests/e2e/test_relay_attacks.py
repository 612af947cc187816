"""What strangers try at a relay with credentials, and what it answers: the table of docs/security.md.

`pytest -rP` prints the table. A row that is not on the page, or is there in other words, fails.
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from deploy.setup_env import ROOT
from paramserver.client import RelayClient, publish
from paramserver.credentials.authority import Authority
from protos.access.credentials import CREDENTIALS_VARIABLE, Credentials
from protos.access.fleet import Identity
from protos.errors import LaminarError
from tests.support.fleet_credentials import authority_of, write_holder
from tests.support.relays import Relays
from tests.support.secured_relay import client_context, in_thread
from tests.support.weights import source_of, weights

pytestmark = pytest.mark.slow

MODEL = "policy"


@dataclass(frozen=True, slots=True)
class Scene:
    """A relay at `address`, and the directory of its fleet; `scratch` is for strangers' credentials."""

    address: str
    fleet: Path
    scratch: Path

    def client(self, holder: str) -> RelayClient:
        return RelayClient(self.address, timeout_s=60.0, credentials=Credentials(self.fleet / holder))

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


async def reader_publishes(scene: Scene) -> str:
    async with scene.client("reader") as client:
        return await _refused(publish(client, MODEL, source_of(weights(1)), step=1, run="r"))


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
    "a method that does not exist": unknown_method,
    "a reader publishes": reader_publishes,
    "a gateway drops a model": gateway_drops,
    "a trainer drains a relay": trainer_drains,
    "a relay adopts a registry": relay_adopts,
}


@pytest.fixture
async def scene(relays: Relays, fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.delenv(CREDENTIALS_VARIABLE, raising=False)
    daemon = await asyncio.to_thread(relays.start, "a", "--credentials", str(fleet / "relay"))
    found = Scene(daemon.ready["grpc"], fleet, tmp_path)
    async with found.client("trainer") as trainer:
        await (await publish(trainer, MODEL, source_of(weights(1)), step=1, run="r")).wait_sealed(60.0)
    yield found
    async with found.client("reader") as reader:
        assert [one.version for one in await reader.versions(MODEL)] == [1], "it serves as before"


async def test_the_page_has_what_each_attempt_is_answered(scene: Scene) -> None:
    page = (ROOT / "docs/security.md").read_text()
    rows = [
        f"| {what} | {(await attempt(scene)).replace(scene.address, 'HOST:PORT')} |"
        for what, attempt in ATTEMPTS.items()
    ]
    print("\n".join(["| attempt | answer |", "|---|---|", *rows]))
    assert [row for row in rows if row not in page] == []
