"""Relays with credentials, as their users have them: publish, follow, pull and operate, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

import paramserver.cli
from paramserver.client import RelayClient, publish
from paramserver.credentials.fleet import Fleet
from protos.access.credentials import CREDENTIALS_VARIABLE, Credentials
from protos.errors import Forbidden, UnknownModel
from tests.support.processes import Daemon
from tests.support.relays import Relays, until
from tests.support.weights import Arrays, source_of, weights
from trainer_client import Publisher

pytestmark = pytest.mark.slow

MODEL = "policy"


async def run(address: str, *words: str, holder: Path | None) -> Result:
    """The command with those words, by the holder of that directory."""
    runner = CliRunner(env={CREDENTIALS_VARIABLE: str(holder) if holder else ""})
    return await asyncio.to_thread(runner.invoke, paramserver.cli.cli, [*words, "--relay", address])


def client(address: str, holder: Path) -> RelayClient:
    return RelayClient(address, timeout_s=60.0, credentials=Credentials(holder))


async def test_a_fleet_with_credentials_does_all_that_one_without_does(
    relays: Relays, fleet: Path, tmp_path: Path
) -> None:
    head, tail = (relays.start(name, "--credentials", str(fleet / "relay")) for name in "ab")
    first, second = head.ready["grpc"], tail.ready["grpc"]
    tensors = weights(1)
    await asyncio.to_thread(publish_all, first, fleet / "trainer", tensors)
    async with client(second, fleet / "gateway") as gateway:
        assert [one.version for one in await gateway.versions(MODEL)] == [1]
        lease = await gateway.acquire(MODEL, holder="engine")
        await gateway.report_load(MODEL, 1, "e0", "")
        await gateway.release(lease)
    out = tmp_path / "weights"
    pulled = await run(second, "pull", "--model", MODEL, "--out", str(out), holder=fleet / "admin")
    assert pulled.exit_code == 0, pulled.output
    [pulled_file] = out.glob("*.safetensors")
    assert load_file(pulled_file).keys() == tensors.keys()
    status = await run(first, "status", "--wait-s", "60", "--members", "2", holder=fleet / "reader")
    assert (status.exit_code, "relay a" in status.output) == (0, True), status.output
    lonely = await run(first, "status", "--wait-s", "0.1", "--members", "3", holder=fleet / "reader")
    assert (lonely.exit_code, "knows 2 of 3 relays after 0.1 s: a, b" in lonely.output) == (1, True), lonely.output
    dropped = await run(second, "drop", "--model", MODEL, holder=fleet / "admin")
    assert dropped.exit_code == 0, dropped.output
    drained = await run(second, "drain", holder=fleet / "relay")
    assert drained.exit_code == 0, drained.output
    assert "access control: " in head.log()
    assert all(
        word not in head.log() for word in ("PRIVATE KEY", Credentials(fleet / "relay").material.fleet_keys[0].hex())
    )


def publish_all(address: str, holder: Path, tensors: Arrays, step: int = 1) -> None:
    with Publisher(address, MODEL, credentials=holder, timeout_s=60.0) as publisher:
        publisher.publish(tensors, step=step, wait="all")


async def test_a_relay_that_was_killed_serves_again_from_its_pool(relays: Relays, fleet: Path) -> None:
    flags = ("--credentials", str(fleet / "relay"), "--pool-dir", str(relays.pools / "kept"))
    first = relays.start("a", *flags)
    await asyncio.to_thread(publish_all, first.ready["grpc"], fleet / "trainer", weights(1))
    first.kill()
    second = relays.start("a", *flags)
    async with client(second.ready["grpc"], fleet / "reader") as reader:

        async def back() -> bool:
            return [one.version for one in await reader.versions(MODEL)] == [1]

        await until(back, "the version is there again")
    await asyncio.to_thread(publish_all, second.ready["grpc"], fleet / "trainer", weights(2), 2)


async def test_who_may_not_is_told_what_would(relays: Relays, fleet: Path) -> None:
    daemon = relays.start("a", "--credentials", str(fleet / "relay"))
    address = daemon.ready["grpc"]
    async with client(address, fleet / "reader") as reader:
        with pytest.raises(UnknownModel, match="known: none; only a caller with the role trainer or admin begins one"):
            await publish(reader, MODEL, source_of(weights(1)), step=1, run="r")
        async with client(address, fleet / "trainer") as trainer:
            await (await publish(trainer, MODEL, source_of(weights(1)), step=1, run="r")).wait_all(120.0)
        with pytest.raises(Forbidden, match=r"reader reader does not allow: claim a run.*trainer or admin"):
            await publish(reader, MODEL, source_of(weights(2)), step=2, run="r")
    refused = await run(address, "drop", "--model", MODEL, holder=fleet / "trainer")
    assert refused.exit_code == 1
    assert "error: the certificate of trainer trainer does not allow: end a model" in refused.output
    refused = await run(address, "status", holder=None)
    assert (refused.exit_code, CREDENTIALS_VARIABLE in refused.output) == (1, True), refused.output


async def test_certificates_are_replaced_while_relays_and_trainer_run(relays: Relays, own_fleet: Path) -> None:
    daemons = [relays.start(name, "--credentials", str(own_fleet / "relay")) for name in "ab"]
    holders = [own_fleet / "trainer", own_fleet / "gateway"]
    async with (
        client(daemons[0].ready["grpc"], holders[0]) as trainer,
        client(daemons[1].ready["grpc"], holders[1]) as gateway,
    ):
        versions = gateway.watch(MODEL)
        for step in range(1, 5):
            ticket = await publish(trainer, MODEL, source_of(weights(step)), step=step, run="r")
            await ticket.wait_all(120.0)
            async for event in versions:
                if (event.kind, event.version.step) == ("available", step):
                    break
            if step <= 3:
                Fleet(own_fleet).rotate(30)
                await taken_over(daemons, own_fleet)
    assert all(daemon.process.poll() is None for daemon in daemons)


async def taken_over(daemons: list[Daemon], fleet: Path) -> None:
    """Each relay uses what its directory has now; an operator sees it in the status, too."""
    wanted = Credentials(fleet / "relay").material

    async def seen() -> bool:
        found = []
        for daemon in daemons:
            async with client(daemon.ready["grpc"], fleet / "reader") as caller:
                access = (await caller.status()).access
                assert access is not None
                found.append((access.expires_unix_s, access.cas, access.num_fleet_keys, access.failure))
        return found == [(wanted.expires_unix_s, wanted.cas, len(wanted.fleet_keys), "")] * len(daemons)

    await until(seen, "both use the new files")
