"""Relays, the trainer's SDK and the engines' plugin of two releases in one chain: every version is the same for all.

A rolling upgrade as it is done, and the way back: a relay joins the other release's chain, takes over from its master,
and is started in its place on the same pool.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paramserver.client import ModelStatus, RelayClient
from paramserver.memory import stored
from tests.support import links
from tests.support.fleet import until
from tests.support.hosts import own_hosts, start_relay
from tests.support.processes import Daemon
from tests.support.relays import PATIENT, Relays
from tests.support.releases import Release

pytestmark = [pytest.mark.upgrade, pytest.mark.slow]

MODEL = "policy"


@dataclass
class Tier:
    """Relays of any release against one etcd."""

    relays: Relays

    def start(self, release: Release, name: str, *flags: str) -> Daemon:
        """Each name has its own pool, over restarts."""
        where = [f"--name={name}", f"--etcd={self.relays.etcd}", f"--pool-dir={self.relays.pools / name}"]
        command = ["paramserver", "serve", *where, "--pool-bytes=256MiB", "--port=0", *PATIENT, *flags]
        daemon = release.start(f"relay-{name}-{len(self.relays.daemons)}", command, self.relays.directory)
        self.relays.daemons.append(daemon)
        return daemon


@pytest.fixture
def tier(relays: Relays) -> Tier:
    return Tier(relays)


def models(relay: Daemon) -> dict[str, ModelStatus]:
    async def found() -> dict[str, ModelStatus]:
        async with RelayClient(relay.ready["grpc"], timeout_s=60.0) as client:
            return {model.model: model for model in (await client.status()).models}

    return asyncio.run(found())


def holds(relay: Daemon, version: int) -> bool:
    found = models(relay).get(MODEL)
    return found is not None and version in found.versions


def master(relay: Daemon) -> str:
    return models(relay)[MODEL].master


def publish(release: Release, relay: Daemon, step: int, *flags: str) -> dict[str, Any]:
    found: dict[str, Any] = release.program("publish.py", relay.ready["grpc"], MODEL, step, *flags)
    return found


def read(release: Release, published: dict[str, Any], *relays: Daemon) -> None:
    """By the release's plugin, on each relay, once the relay has it: the very tensors that were published."""
    for relay in relays:
        until(lambda relay=relay: holds(relay, published["version"]), f"{published} at {relay.name}")  # type: ignore[misc]
    addresses = [relay.ready["grpc"] for relay in relays]
    found = release.program("read.py", MODEL, published["version"], *addresses)
    assert found["digest"] == published["digest"]


def test_a_chain_is_upgraded_relay_by_relay(tier: Tier, order: tuple[Release, Release]) -> None:
    first, second = order
    a = tier.start(first, "a")
    one = publish(first, a, 1)
    b = tier.start(second, "b")
    read(second, one, a, b)
    print(f"{second} relay joined {first} master and fetched version 1: {second} plugin proves it on both")

    two = publish(second, a, 2, "--tcp")
    read(first, two, a, b)
    print(
        f"{second} SDK streamed version 2 to {first} master, {second} relay took it: {first} plugin proves it on both"
    )

    three = publish(first, b, 3)
    read(second, three, a, b)
    assert master(b) == "a"
    print(f"{first} SDK published version 3 by way of {second} relay, whose master is {first}")

    a.kill()
    until(lambda: master(b) == "b", "b is master")
    four = publish(first, b, 4)
    read(first, four, b)
    assert four["version"] == 4
    print(f"{second} relay took over from {first} master: {first} SDK published version 4 there")

    a = tier.start(second, "a")
    read(second, three, a)
    read(first, four, a, b)
    print(f"{second} relay started on the pool of {first}: it has version 3 of before, and fetched 4")

    five = publish(second, a, 5)
    read(second, five, a, b)
    assert five["version"] == 5
    print(f"all relays are {second}: version 5")


def test_a_relay_of_each_release_follows_a_master_of_the_other(tier: Tier, order: tuple[Release, Release]) -> None:
    first, second = order
    a, b, c = tier.start(first, "a", "--chunk-bytes=16MiB"), tier.start(second, "b"), tier.start(first, "c")
    published = publish(second, a, 1)
    read(first, published, a, b, c)
    print(f"chain {first}, {second}, {first}, chunks of 16 MiB: {second} SDK, {first} plugin")


def test_operators_commands_work_on_relays_of_the_other_release(
    tier: Tier, order: tuple[Release, Release], tmp_path: Path
) -> None:
    first, second = order
    a, b = tier.start(first, "a"), tier.start(first, "b")
    published = publish(first, a, 1)
    read(first, published, a, b)
    to = ("--relay", a.ready["grpc"])
    for words in (
        ("status", *to),
        ("versions", *to, "--model", MODEL),
        ("pull", *to, "--model", MODEL, "--out", str(tmp_path / "out")),
        ("drain", *to, "--wait-s", "60"),
    ):
        done = second.run("paramserver", *words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    shown = json.loads(second.run("paramserver", "versions", *to, "--model", MODEL, "--json").stdout)
    assert shown["version"] == 1
    assert list((tmp_path / "out").rglob("*.safetensors"))
    print(f"{second} paramserver status, versions, pull, drain on {first} relays")


def test_versions_on_disk_are_found_by_the_other_release(
    tier: Tier, order: tuple[Release, Release], tmp_path: Path
) -> None:
    first, second = order
    spill = f"--spill={tmp_path / 'spill'}"
    a = tier.start(first, "a", spill)
    published = publish(first, a, 1)
    until(lambda: stored.find(tmp_path / "spill"), "the version on disk")
    assert a.stop() == 0
    a = tier.start(second, "a", spill)
    read(second, published, a)
    print(f"{second} relay serves version 1 from the --spill of {first}")


def test_what_only_the_new_sdk_has_is_refused_by_name_or_works_on_old_relays(
    tier: Tier, old: Release, new: Release
) -> None:
    a, b = tier.start(old, "a"), tier.start(new, "b", "--no-publish-host")
    streamed = new.program("extras.py", a.ready["grpc"], "streamed", 1, "stream")
    assert streamed == {"version": 1}
    refused = new.program("extras.py", a.ready["grpc"], "filed", 1, "files")
    assert refused["error"] == "unsupported_field"
    assert "older relay" in refused["message"]
    assert publish(new, a, 1)["version"] == 1
    print(f"new SDK on old master: publish_stream works, plain files are refused: {refused['message']}")
    until(lambda: "streamed" in models(b), "the streamed version at the new relay")


def test_plain_files_of_a_new_master_reach_old_relays(tier: Tier, old: Release, new: Release) -> None:
    a, b = tier.start(new, "a"), tier.start(old, "b", "--no-publish-host")
    assert new.program("extras.py", a.ready["grpc"], MODEL, 1, "files") == {"version": 1}
    until(lambda: holds(b, 1), "version 1 at the old relay")
    old.program("read.py", MODEL, 1, a.ready["grpc"], b.ready["grpc"])
    assert [path.read_text() for path in tier.relays.pools.rglob("config.json")] == ["{}", "{}"]
    print("new SDK and master, old follower: a version with plain files is whole there; old plugin proves it")


@pytest.mark.skipif(bool(links.missing()), reason=links.missing() or "hosts of their own can be made")
def test_hosts_that_were_set_up_alike_are_upgraded_one_after_the_other(
    old: Release, new: Release, tmp_path: Path
) -> None:
    """This release's publisher goes first: relays of the one before do not prove which of them listens at a path."""
    with own_hosts(2) as (net, *hosts):
        etcd, on = net.start_etcd(tmp_path).ready["etcd"], dict(zip("ab", hosts, strict=True))

        def start(release: Release, name: str) -> Daemon:
            return start_relay(name, on[name], etcd, tmp_path, python=release.python)

        def there(name: str) -> Release:
            return Release(f"new on {name}", (*on[name].prefix, *new.python))

        a, b = start(old, "a"), start(old, "b")
        for step, (name, relay) in enumerate((("a", a), ("b", b)), 1):
            published = publish(there(name), relay, step)
            read(there("a"), published, a)
            read(there("b"), published, b)
        assert master(b) == "a"
        print("new SDK published from both hosts to the old master on one of them")

        a.kill()
        until(lambda: master(b) == "b", "b is master")
        a = start(new, "a")
        published = publish(there("a"), a, 3)
        read(there("a"), published, a)
        read(there("b"), published, b)
        print("the new relay on the other host took what the new SDK beside it published to the old master")
        assert [relay.stop() for relay in (a, b)] == [0, 0]
