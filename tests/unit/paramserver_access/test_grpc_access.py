"""Who gets through to a relay's gRPC port: by TLS, by role, and while certificates are replaced."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paramserver.client import RelayClient
from paramserver.core.access import METHODS
from paramserver.credentials.authority import Authority
from paramserver.credentials.fleet import Fleet
from paramserver.daemon.access import check_serves
from protos.access.credentials import CREDENTIALS_VARIABLE, Credentials
from protos.access.fleet import FLEET_ROLES, Identity
from protos.errors import Forbidden, InvalidRequest, LaminarError, Unavailable
from protos.laminar.v1 import relay_pb2 as pb
from tests.support.fake_relay import relay as plain_relay
from tests.support.fleet_credentials import authority_of, write_holder
from tests.support.scripted_engine import MODEL
from tests.support.secured_relay import client_context, in_thread, secured, tls_server

RELAY = Identity("relay", "relay")


def client(address: str, directory: Path) -> RelayClient:
    return RelayClient(address, timeout_s=60.0, credentials=Credentials(directory))


@pytest.fixture
async def relay(fleet: Path) -> AsyncIterator[str]:
    async with secured(Credentials(fleet / "relay")) as (found, address):
        found.versions = [1, 2]
        yield address


# -- roles


@pytest.mark.parametrize("role", FLEET_ROLES)
async def test_roles_are_checked_at_each_call(fleet: Path, relay: str, role: str) -> None:
    async with client(relay, fleet / role) as caller:
        assert [one.version for one in await caller.versions(MODEL)] == [1, 2]
        if role == "reader":
            with pytest.raises(Forbidden, match=r"the certificate of reader reader does not allow: acquire.*or admin"):
                await caller.acquire(MODEL, holder="h")
        else:
            await caller.release(await caller.acquire(MODEL, holder="h"))
        with pytest.raises(Forbidden if role not in ("admin", "relay") else LaminarError) as refused:
            await caller.drop(MODEL)
        assert isinstance(refused.value, Forbidden) == (role not in ("admin", "relay"))


async def test_streams_are_checked_too(fleet: Path, relay: str) -> None:
    async with client(relay, fleet / "gateway") as caller:
        event = await anext(caller.watch(MODEL))
        assert event.version.version == 1
        stream = caller.stub.HoldRun(pb.HoldRunRequest(model=MODEL, run="r", publisher="p"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(stream))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_health_and_reflection_are_for_every_role(fleet: Path, relay: str) -> None:
    async with client(relay, fleet / "reader") as caller:
        channel = caller._connection.channel()
        checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        first = await anext(aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())))
        assert first.status == health_pb2.HealthCheckResponse.SERVING
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([question]))
        services = (await anext(aiter(call))).list_services_response.service
        assert "grpc.health.v1.Health" in {service.name for service in services}


async def test_a_method_of_nobody_is_refused(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is served and that the table forgot."""
    without = {method: of for method, of in METHODS.items() if not method.endswith("/Versions")}
    monkeypatch.setattr("paramserver.core.access.METHODS", without)
    async with secured(Credentials(fleet / "relay")) as (_, address), client(address, fleet / "admin") as caller:
        with pytest.raises(Forbidden, match="no operation"):
            await caller.versions(MODEL)


async def test_a_certificate_of_the_fleet_without_a_role_is_nobodys(fleet: Path, relay: str, tmp_path: Path) -> None:
    """As another tool might issue with the same CA. A client of ours does not even use it."""
    identity = Identity("root", "a")  # type: ignore[arg-type]
    directory = write_holder(tmp_path / "odd", authority_of(fleet), identity, trusts=fleet)
    with pytest.raises(InvalidRequest, match="is no role"):
        Credentials(directory)
    parts = [(directory / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem")]
    async with grpc.aio.secure_channel(relay, grpc.ssl_channel_credentials(*parts)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


# -- TLS


async def test_strangers_end_in_the_handshake(fleet: Path, relay: str, tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    admin = Identity("admin", "a")
    foreign = write_holder(tmp_path / "foreign", Authority.new(now), admin, trusts=fleet)
    expired = write_holder(tmp_path / "expired", authority_of(fleet), admin, trusts=fleet, days_ago=31)
    assert await in_thread(relay, client_context(fleet, fleet / "admin")) == "served"
    for holder in (None, foreign, expired):
        assert await in_thread(relay, client_context(fleet, holder)) != "served", holder
    for most in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        assert await in_thread(relay, client_context(fleet, fleet / "admin", most=most)) != "served", most
    assert await in_thread(relay, client_context(fleet, fleet / "admin", most=ssl.TLSVersion.TLSv1_2)) == "served"


async def test_a_client_takes_no_server_but_a_relay_of_its_fleet(fleet: Path, tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    issuer = authority_of(fleet)
    impostors = {
        "a foreign relay": (Authority.new(now), RELAY, {}),
        "a trainer that serves": (issuer, Identity("trainer", "t"), {}),
        "a relay of another host": (issuer, RELAY, {"hosts": ("elsewhere",)}),
        "an expired relay": (issuer, RELAY, {"days_ago": 31}),
    }
    for what, (authority, identity, options) in impostors.items():
        directory = write_holder(tmp_path / what, authority, identity, trusts=fleet, **options)  # type: ignore[arg-type]
        async with tls_server(directory) as address, client(address, fleet / "admin") as caller:
            with pytest.raises(Unavailable, match="no relay answers"):
                await caller.versions(MODEL)


async def test_plain_and_tls_do_not_mix(fleet: Path, relay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CREDENTIALS_VARIABLE, raising=False)
    async with RelayClient(relay, timeout_s=60.0) as plain:
        with pytest.raises(Unavailable, match="LAMINAR_CREDENTIALS"):
            await plain.versions(MODEL)
    async with plain_relay() as (_, address), client(address, fleet / "admin") as caller:
        with pytest.raises(Unavailable, match="no relay answers"):
            await caller.versions(MODEL)


async def test_a_client_finds_its_credentials_in_the_environment(
    fleet: Path, relay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CREDENTIALS_VARIABLE, str(fleet / "reader"))
    async with RelayClient(relay, timeout_s=60.0) as caller:
        assert len(await caller.versions(MODEL)) == 2


# -- what serves


@pytest.mark.parametrize("role", sorted({*FLEET_ROLES} - {"relay"}))
def test_only_a_relays_certificate_may_serve(fleet: Path, role: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"certificate with the role {role}.*issue DIR relay"):
        check_serves(Credentials(fleet / role), "127.0.0.1")


def test_a_relay_serves_under_names_of_its_certificate_alone(fleet: Path) -> None:
    check_serves(Credentials(fleet / "relay"), "trainer-0")
    with pytest.raises(InvalidRequest, match=r"is for .*trainer-0.* reach this relay by trainer-1.*--host trainer-1"):
        check_serves(Credentials(fleet / "relay"), "trainer-1")


# -- replacing


async def test_a_rotation_of_ca_and_certificates_breaks_no_connection(own_fleet: Path) -> None:
    """Server and clients take each step over by themselves; a watch that began before it goes on through all."""
    serving, asking = Credentials(own_fleet / "relay"), Credentials(own_fleet / "gateway")
    async with secured(serving) as (found, address):
        found.versions = [1]
        caller = RelayClient(address, timeout_s=60.0, credentials=asking)
        async with caller:
            watched = caller.watch(MODEL)
            assert (await anext(watched)).version.version == 1
            used = {asking.material.certificate}
            for number in range(2, 5):
                Fleet(own_fleet).rotate(30)
                for one in (serving, asking):
                    one.refresh()
                used.add(asking.material.certificate)
                assert len(await caller.versions(MODEL)) == number - 1
                found.publish(number)
                assert (await anext(watched)).version.version == number
            assert len(used) == 2, "the certificate was replaced in the second step"
            assert len(caller._connection._former) <= 3
        assert caller._connection._former == []
        old = client_context(own_fleet, own_fleet / "gateway")
        assert await in_thread(address, old) == "served"


async def test_what_was_issued_before_a_rotation_is_refused_after_it(own_fleet: Path, fleet: Path) -> None:
    serving = Credentials(own_fleet / "relay")
    async with secured(serving) as (_, address):
        for step, before, after in (("add", True, True), ("use", True, True), ("drop", False, True)):
            assert Fleet(own_fleet).rotate(30) == step
            serving.refresh()
            trusting = client_context(own_fleet, fleet / "admin")
            assert (await in_thread(address, trusting) == "served") == before, step
            assert (await in_thread(address, client_context(own_fleet, own_fleet / "admin")) == "served") == after


async def test_a_watch_goes_on_with_the_credentials_of_its_time(
    own_fleet: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that comes back after a whole rotation accepts nothing that the watch began with."""
    monkeypatch.setattr("protos.access.credentials.REFRESH_S", 0.0)
    async with client(f"127.0.0.1:{port}", own_fleet / "gateway") as caller:
        watched = caller.watch(MODEL)
        async with secured(Credentials(own_fleet / "relay"), port) as (found, _):
            found.versions = [1]
            assert (await anext(watched)).version.version == 1
        following = asyncio.ensure_future(anext(watched))
        for _ in range(3):
            Fleet(own_fleet).rotate(30)
        async with secured(Credentials(own_fleet / "relay"), port) as (found, _):
            found.versions = [1, 2]
            assert (await following).version.version == 2
