"""Hosts that were set up alike, with the same paths and ports: nobody takes the relay beside it for another host's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from paramserver.client import RelayClient
from tests.support import links
from tests.support.hosts import OwnHost, own_hosts, start_relay
from tests.support.processes import Daemon

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(links.missing()), reason=links.missing() or "hosts of their own can be made"),
]

PUBLISH = """
import json, logging, sys
import numpy as np
from trainer_client import Publisher, TensorMeta

logging.basicConfig(stream=sys.stderr, level=logging.INFO)
relay, how, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
tensors = {"w": np.random.default_rng(seed).random((300, 1000), np.float32)}
with Publisher(relay, run=f"run-{how}-{seed}") as publisher:
    for step in range(2):
        if how == "stream":
            manifest = [TensorMeta("w", "F32", (300, 1000))]
            ticket = publisher.publish_stream(manifest, tensors, step=step, wait=2)
        else:
            ticket = publisher.publish(tensors, step=step, wait=2)
    print(json.dumps({"version": ticket.version, "master": publisher.status().master}))
"""
BY_PORT = "the bytes go over the data port"


@dataclass
class Fleet:
    """Two hosts, each with a relay at the same paths and ports, by the relay's name."""

    hosts: dict[str, OwnHost]
    relays: dict[str, Daemon]

    def publish(self, on: str, how: str, seed: int) -> tuple[dict[str, Any], str]:
        """What a trainer on a relay's host got, and its log."""
        command = [*self.hosts[on].prefix, sys.executable, "-c", PUBLISH, self.relays[on].ready["grpc"], how, str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout), done.stderr

    async def bytes_at(self, on: str, version: int) -> bytes:
        async with RelayClient(self.relays[on].ready["grpc"]) as relay:
            lease = await relay.acquire("policy", version, holder="test")
            files = sorted(self.hosts[on].path(str(lease.path)).glob("*.safetensors"))
            found = b"".join(path.read_bytes() for path in files)
            await relay.release(lease)
            return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("hosts")
    with own_hosts(2) as (net, *hosts):
        etcd = net.start_etcd(directory).ready["etcd"]
        named = dict(zip("ab", hosts, strict=True))
        relays = {name: start_relay(name, host, etcd, directory) for name, host in named.items()}
        yield Fleet(named, relays)
        assert [relay.stop() for relay in relays.values()] == [0, 0]


@pytest.mark.parametrize("how", ["dict", "stream"])
def test_a_publisher_writes_to_its_master_whatever_listens_at_that_path_on_its_own_host(fleet: Fleet, how: str) -> None:
    """The master's socket has the same path as that of the relay beside the publisher."""
    for seed, on in enumerate("ab"):
        found, log = fleet.publish(on, how, seed)
        assert log.count(BY_PORT) == (0 if found["master"] == on else 1), log
        if found["master"] != on:
            assert "another relay is meant than the one at this socket" in log
        there, here = [asyncio.run(fleet.bytes_at(name, found["version"])) for name in "ab"]
        assert there == here
        assert len(there) > 1_200_000
    others = {name: relay.log() for name, relay in fleet.relays.items()}
    assert not any("Traceback" in log for log in others.values()), others
