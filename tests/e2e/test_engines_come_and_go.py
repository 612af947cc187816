"""Engines join and leave a running gateway, as processes: by the relays beside them, by the admin API, by dying.

The engines are SGLang stand-ins: what they say depends on the loaded weights and on every id before, so that a mixed
version, a lost token or one that came twice changes the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from tests.support import processes
from tests.support.fleet import until
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.relays import Relays
from tests.support.sglang.weights import read_directory, said
from tests.support.tiny_model import tiny_model
from trainer_client import Publisher

pytestmark = pytest.mark.slow

PROMPT = list(range(40, 60))
TOKENS = 300


@dataclass
class Answer:
    """A turn asked for in a thread of its own."""

    url: str
    body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        wanted = {"return_token_ids": True, "return_weight_versions": True, "ignore_eos": True, "temperature": 0}
        asked = {"model": "policy", "prompt": PROMPT, "max_tokens": TOKENS, **wanted}
        self.body = httpx.post(f"{self.url}/v1/completions", json=asked, timeout=120).json()

    def choice(self) -> dict[str, Any]:
        self._thread.join()
        assert "choices" in self.body, self.body
        choice: dict[str, Any] = self.body["choices"][0]
        return choice


@dataclass
class World:
    """A gateway that follows etcd, and what tests start beside it."""

    relays: Relays
    directory: Path
    ports: KeptPorts
    started: list[Daemon] = field(default_factory=list)

    def engine(self, name: str) -> Daemon:
        """One that was killed comes back under its address."""
        flags = [
            f"--port={self.ports.of(name)}",
            f"--model={tiny_model()}",
            f"--hold-file={self.hold}",
            "--weight-version=0",
        ]
        return self._start(name, ["tests.support.sglang", *flags])

    @property
    def hold(self) -> Path:
        """While it exists, turns stop in their middle."""
        return self.directory / "hold"

    def gateway(self, *flags: str) -> str:
        command = ["gateway", "serve", "--port=0", "--model=policy", f"--tokenizer={tiny_model()}"]
        gateway = self._start("gateway", [*command, f"--etcd={self.relays.etcd}", "--poll-interval-s=0.2", *flags])
        return str(gateway.ready["url"])

    def _start(self, name: str, command: list[str]) -> Daemon:
        self.started.append(processes.start(name, command, self.directory))
        return self.started[-1]

    def close(self) -> None:
        ends = {d.name: d.stop() for d in reversed(self.started) if d.process.returncode is None}
        assert set(ends.values()) <= {0}, (ends, self.started[0].log()[-3000:])


@pytest.fixture
def world(relays: Relays, tmp_path: Path) -> Iterator[World]:
    with KeptPorts() as ports:
        found = World(relays, tmp_path, ports)
        yield found
        found.close()


def publish(relay: Daemon, seed: int) -> int:
    with Publisher(relay.ready["grpc"], "policy") as publisher:
        weights = load_file(tiny_model(seed=seed) / "model.safetensors")
        return publisher.publish(weights, step=seed, wait="all").version


def expected(seed: int) -> list[int]:
    return said(read_directory(tiny_model(seed=seed)), PROMPT, TOKENS)[0]


def engines(url: str) -> dict[str, tuple[str, int]]:
    """Engine to its state and version."""
    status = httpx.get(f"{url}/status").raise_for_status().json()
    return {e["name"]: (e["state"], e["version"]) for e in status["engines"]}


def counters(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/status").raise_for_status().json()["counters"]
    return found


def running(url: str) -> str:
    """The engine of the only turn, once tokens have come."""

    def look() -> list[str]:
        status = httpx.get(f"{url}/status").json()
        tokens = status["counters"]["tokens_generated"]
        return [e["name"] for e in status["engines"] if e["running"]] if tokens > 20 else []

    [name] = until(look, "a running turn")
    return str(name)


def test_engines_come_with_their_relays_and_leave_with_them(world: World) -> None:
    url = world.gateway()
    beside = {name: world.engine(f"engine-{name}") for name in ("a", "b")}
    relays = {
        # Of a lease of 2 s a busy machine may keep the other relay from renewing its own.
        name: world.relays.start(name, f"--engine=sglang={engine.ready['url']}", "--lease-ttl-s=6")
        for name, engine in beside.items()
    }
    names = {name: f"{name}:{engine.ready['url'].rpartition(':')[2]}" for name, engine in beside.items()}
    until(lambda: engines(url) == dict.fromkeys(names.values(), ("serving", 0)), "both engines")
    version = publish(relays["a"], 1)
    until(lambda: engines(url) == dict.fromkeys(names.values(), ("serving", version)), "version 1 on both")

    world.hold.touch()
    answer = Answer(url)
    victim = next(name for name in names if names[name] == running(url))
    other = "b" if victim == "a" else "a"
    relays[victim].kill()
    until(lambda: set(engines(url)) == {names[other]}, "the engine to leave with its relay's lease")
    world.hold.unlink()
    choice = answer.choice()
    assert choice["token_ids"] == expected(1)
    assert {span["version"] for span in choice["weight_versions"]} == {str(version)}
    told = counters(url)
    assert (told["turns_cut"], told["turns_resumed"], told["turns_lost"]) == (1, 1, 0)

    world.relays.start(victim, f"--engine=sglang={beside[victim].ready['url']}")
    until(lambda: engines(url).get(names[victim]) == ("serving", version), "the engine to come back with its relay")


def test_an_engine_that_restarts_in_mid_stream_serves_nothing_before_it_is_refreshed(world: World) -> None:
    relay = world.relays.start("a")
    beside = {name: world.engine(name) for name in ("e0", "e1")}
    flags = [f"--engine={name}=sglang={engine.ready['url']}" for name, engine in beside.items()]
    url = world.gateway("--no-probe", f"--relay={relay.ready['grpc']}", *flags)  # what is generated is turns alone
    version = publish(relay, 1)
    until(lambda: engines(url) == dict.fromkeys(beside, ("serving", version)), "version 1 on both")

    world.hold.touch()
    answer = Answer(url)
    victim = running(url)
    beside[victim].kill()
    again = world.engine(victim)
    world.hold.unlink()
    others = [Answer(url) for _ in range(3)]
    for choice in (answer.choice(), *(other.choice() for other in others)):
        assert choice["token_ids"] == expected(1)
        assert {span["version"] for span in choice["weight_versions"]} == {str(version)}
    until(lambda: engines(url) == dict.fromkeys(beside, ("serving", version)), "both engines again")
    told = counters(url)
    assert (told["turns_lost"], told["turns_mixed_version"], told["version_mismatches"]) == (0, 0, 0)
    posts = [line for line in again.log().splitlines() if line.startswith("POST")]
    assert "POST /update_weights_from_disk under 0" in posts
    assert "POST /generate under 0" not in posts


def test_an_engine_is_added_and_taken_out_by_the_admin_api(world: World) -> None:
    url = world.gateway()
    beside = {name: world.engine(name) for name in ("e0", "e1")}
    for name, engine in beside.items():
        body = {"name": name, "kind": "sglang", "url": engine.ready["url"]}
        assert httpx.post(f"{url}/admin/engines", json=body).status_code == 201
    until(lambda: engines(url) == dict.fromkeys(beside, ("serving", 0)), "both engines")
    world.hold.touch()
    answer = Answer(url)
    victim = running(url)
    assert httpx.delete(f"{url}/admin/engines/{victim}").json() == {"name": victim, "removed": True}
    world.hold.unlink()
    assert answer.choice()["token_ids"] == expected(0)
    assert set(engines(url)) == set(beside) - {victim}

    beside[victim].kill()
    unreachable = {"name": "e9", "kind": "sglang", "url": beside[victim].ready["url"]}
    told = httpx.post(f"{url}/admin/engines", json=unreachable)
    assert told.status_code == 503
    message = told.json()["error"]["message"]
    assert message.startswith("engine e9 cannot be used: GET http://127.0.0.1:"), message
    assert "does not accept connections" in message, message
