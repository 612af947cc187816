"""Hosts that were set up alike, with the same paths and ports: nobody takes the relay beside it for another host's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from paramserver.client import RelayClient
from tests.support import links
from tests.support.hosts import OwnHost, own_hosts, start_relay
from tests.support.processes import Daemon, start
from tests.support.relays import until
from tests.support.tiny_model import tiny_model
from trainer_client import Publisher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(links.missing()), reason=links.missing() or "hosts of their own can be made"),
]

PUBLISH = """
import json, logging, sys
import numpy as np
from trainer_client import Publisher, TensorMeta

logging.basicConfig(stream=sys.stderr, level=logging.INFO)
relay, how, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])  # and a line of stdin before each version
tensors = {"w": np.random.default_rng(seed).random((300, 1000), np.float32)}
with Publisher(relay, run=f"run-{how}-{seed}") as publisher:
    for step in range(2):
        sys.stdin.readline()
        if how == "stream":
            manifest = [TensorMeta("w", "F32", (300, 1000))]
            ticket = publisher.publish_stream(manifest, tensors, step=step, wait=2)
        else:
            ticket = publisher.publish(tensors, step=step, wait=2)
        print(json.dumps({"version": ticket.version, "master": publisher.status().master}), flush=True)
"""
BY_PORT = "the bytes go over the data port"


@dataclass
class Fleet:
    """Two hosts, each with a relay at the same paths and ports, by the relay's name."""

    hosts: dict[str, OwnHost]
    etcd: str
    directory: Path
    relays: dict[str, Daemon] = field(default_factory=dict)

    def publish(self, on: str, how: str, seed: int) -> tuple[dict[str, Any], str]:
        """What a trainer on a relay's host got in the end, and its log."""
        with self.trainer(on, how, seed) as trainer:
            out, log = trainer.communicate("1\n2\n", timeout=300)
        assert trainer.returncode == 0, log[-4000:]
        return json.loads(out.splitlines()[-1]), log

    def trainer(self, on: str, how: str, seed: int) -> subprocess.Popen[str]:
        command = [*self.hosts[on].prefix, sys.executable, "-c", PUBLISH, self.relays[on].ready["grpc"], how, str(seed)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    def start(self, name: str) -> None:
        self.relays[name] = start_relay(name, self.hosts[name], self.etcd, self.directory)

    async def master_at(self, on: str) -> str:
        async with RelayClient(self.relays[on].ready["grpc"]) as relay:
            return next(model.master for model in (await relay.status()).models if model.model == "policy")

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
        found = Fleet(dict(zip("ab", hosts, strict=True)), etcd, directory)
        for name in found.hosts:
            found.start(name)
        yield found
        assert [relay.stop() for relay in found.relays.values()] == [0, 0]


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


def test_a_publisher_goes_on_at_a_new_master_on_another_host(fleet: Fleet) -> None:
    """Though the master of before is back beside it, and listens at the path that the new one has on its own host."""
    fleet.publish("a", "dict", 2)
    old = asyncio.run(fleet.master_at("a"))
    new = {"a": "b", "b": "a"}[old]
    with fleet.trainer(old, "dict", 3) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        trainer.stdin.write("1\n")
        trainer.stdin.flush()
        assert json.loads(trainer.stdout.readline())["master"] == old
        fleet.relays[old].kill()

        async def is_led() -> bool:
            return await fleet.master_at(new) == new

        asyncio.run(until(is_led, "another master"))
        fleet.start(old)
        out, log = trainer.communicate("2\n", timeout=300)
    assert trainer.returncode == 0, log[-4000:]
    found = json.loads(out)
    assert (found["master"], log.count(BY_PORT)) == (new, 1), log
    assert "another relay is meant than the one at this socket" in log
    there, here = [asyncio.run(fleet.bytes_at(name, found["version"])) for name in "ab"]
    assert there == here
    assert len(there) > 1_200_000


def test_a_gateway_has_an_engine_of_another_host_load_from_the_relay_beside_it(fleet: Fleet) -> None:
    """The relay beside the gateway has the same paths, and is not the one that the engine loads from."""
    beside, away = fleet.hosts["a"], fleet.hosts["b"]
    weights = load_file(tiny_model(seed=1) / "model.safetensors")
    with Publisher(fleet.relays["b"].ready["grpc"], "acting") as publisher:
        version = publisher.publish(weights, step=1, wait=2).version
    listens = ("--insecure", "--port=8000")
    named = ("--served-model-name=acting", "--weight-version=0", "--max-model-len=512", "--kv-cache-tokens=4096")
    engine = start(
        "engine",
        [
            "gateway",
            "engine",
            f"--model={tiny_model()}",
            "--dtype=float32",
            f"--host={beside.address}",
            *listens,
            *named,
        ],
        fleet.directory,
        prefix=beside.prefix,
    )
    where = f"--engine=e0=vllm=http://{beside.address}:8000@{fleet.relays['a'].ready['grpc']}"
    command = ["gateway", "serve", "--model=acting", f"--tokenizer={tiny_model()}", f"--host={away.address}", *listens]
    gateway = start("gateway", [*command, where], fleet.directory, prefix=away.prefix)
    url = f"http://{away.address}:8000"

    async def served() -> bool:
        async with httpx.AsyncClient(timeout=60.0) as http:
            [found] = (await http.get(f"{url}/status")).json()["engines"]
        return (found["state"], found["version"]) == ("serving", version)

    asyncio.run(until(served, "the load of the version"))
    asked = {"model": "acting", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60.0).raise_for_status()
    assert answer.headers["X-Laminar-Weight-Version"] == str(version)
    assert [daemon.stop() for daemon in (gateway, engine)] == [0, 0]
