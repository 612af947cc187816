"""Engines on loopback behind relays with credentials, as their users have them: what a gateway does through their ports
of TLS is what it does without, and nobody else gets to the engines."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

import gateway.cli
import paramserver.cli
from protos.access.credentials import CREDENTIALS_VARIABLE
from tests.support import processes
from tests.support.engine_port import address_of, asked, context_of
from tests.support.fleet import until
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.relays import Relays
from tests.support.tiny_model import tiny_model
from trainer_client import Publisher

pytestmark = pytest.mark.slow

TOKENS = 400
"""More than an engine that is held computes (`tests/support/held_engine.py`)."""
ENGINE = ("--max-model-len=2048", "--kv-cache-tokens=8192", "--dtype=float32", "--served-model-name=policy")
ASKED = {"model": "policy", "prompt": list(range(40, 60)), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
TOLD = {"return_token_ids": True, "return_weight_versions": True}


@dataclass
class Secured:
    """Two hosts, each an embedded engine on loopback and a relay with credentials; a gateway that follows etcd."""

    relays: Relays
    fleet: Path
    directory: Path
    ports: KeptPorts
    engines: dict[str, Daemon] = field(default_factory=dict)
    beside: dict[str, Daemon] = field(default_factory=dict)
    gateway: Daemon = field(init=False)

    def start(self) -> None:
        for name in ("a", "b"):
            flags = [f"--port={self.ports.of(name)}", f"--model={tiny_model()}", "--weight-version=0", *ENGINE]
            command = ["tests.support.held_engine", str(self.hold), *flags]
            self.engines[name] = processes.start(f"engine-{name}", command, self.directory)
            self.beside[name] = self.relays.start(
                name,
                f"--engine=embedded={self.engines[name].ready['url']}",
                f"--credentials={self.fleet / 'relay'}",
                "--metrics-port=0",
            )
        self.gateway = processes.start("gateway", ["gateway", "serve", "--port=0", *self.options], self.directory)

    @property
    def options(self) -> list[str]:
        """Of the gateway, and of its doctor."""
        shown = ["--model=policy", f"--tokenizer={tiny_model()}", f"--etcd={self.relays.etcd}"]
        return [*shown, "--poll-interval-s=0.2", "--relay-text", f"--credentials={self.fleet / 'gateway'}"]

    @property
    def hold(self) -> Path:
        """While it exists, turns stop in their middle."""
        return self.directory / "hold"

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.gateway.ready['url']}/status").raise_for_status().json()
        return found

    def states(self) -> dict[str, tuple[str, int]]:
        return {e["name"].partition(":")[0]: (e["state"], e["version"]) for e in self.status()["engines"]}

    def ask(self) -> dict[str, Any]:
        body = httpx.post(f"{self.gateway.ready['url']}/v1/completions", json={**ASKED, **TOLD}, timeout=180).json()
        assert "choices" in body, body
        choice: dict[str, Any] = body["choices"][0]
        return choice

    def close(self) -> None:
        living = [d for d in (self.gateway, *self.engines.values()) if d.process.returncode is None]
        ends = {daemon.name: daemon.stop() for daemon in living}
        assert set(ends.values()) == {0}, (ends, self.gateway.log()[-3000:])


@pytest.fixture
def secured(relays: Relays, fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Secured]:
    monkeypatch.delenv(CREDENTIALS_VARIABLE, raising=False)
    with KeptPorts() as ports:
        found = Secured(relays, fleet, tmp_path, ports)
        found.start()
        yield found
        found.close()


def test_a_gateway_serves_loads_and_resumes_through_the_ports(secured: Secured) -> None:
    until(lambda: secured.states() == {"a": ("serving", 0), "b": ("serving", 0)}, "both engines")
    urls = {e["name"].partition(":")[0]: e["url"] for e in secured.status()["engines"]}
    assert all(url.startswith("https://127.0.0.1:") for url in urls.values()), urls

    with Publisher(secured.beside["a"].ready["grpc"], "policy", credentials=secured.fleet / "trainer") as publisher:
        tensors = load_file(tiny_model(seed=1) / "model.safetensors")
        version = publisher.publish(tensors, step=1, wait="all").version
    until(lambda: secured.states() == dict.fromkeys("ab", ("serving", version)), "the version on both")
    uncut = secured.ask()
    assert {span["version"] for span in uncut["weight_versions"]} == {str(version)}

    # An engine that dies in mid-stream: its turn goes on elsewhere.
    secured.hold.touch()
    answers: list[dict[str, Any]] = []
    turn = threading.Thread(target=lambda: answers.append(secured.ask()))
    turn.start()
    [victim] = until(
        lambda: [e["name"].partition(":")[0] for e in secured.status()["engines"] if e["running"]], "a turn"
    )
    before = secured.status()["counters"]["tokens_generated"]
    until(lambda: secured.status()["counters"]["tokens_generated"] >= max(before, TOKENS + 20), "its first tokens")
    secured.engines[victim].kill()
    secured.hold.unlink()
    turn.join()
    assert answers[0]["token_ids"] == uncut["token_ids"]
    counters = secured.status()["counters"]
    assert (counters["turns_cut"], counters["turns_resumed"], counters["turns_lost"]) == (1, 1, 0)
    until(lambda: secured.states()[victim][0] == "dead", "notice of the death")

    # A client's own text, a look by the doctor, and the relay's status.
    other = next(name for name in "ab" if name != victim)
    text = httpx.post(
        f"{secured.gateway.ready['url']}/v1/completions", json={"model": "policy", "prompt": "one two", "max_tokens": 4}
    )
    assert (text.status_code, "laminar" not in text.json()) == (200, True), text.text
    examined = CliRunner().invoke(gateway.cli.cli, ["doctor", "--port=0", *secured.options])
    assert f"embedded at {urls[other]}: version {version}" in examined.output, examined.output
    status = CliRunner(env={CREDENTIALS_VARIABLE: str(secured.fleet / "reader")}).invoke(
        paramserver.cli.cli, ["status", "--relay", secured.beside[other].ready["grpc"]]
    )
    assert f"at {urls[other]}, which leads to {secured.engines[other].ready['url']}" in status.output, status.output

    # Nobody else gets there, and the gateway goes nowhere else.
    assert asked(urls[other], secured.fleet / "trainer", secured.fleet) != "served"
    reader = context_of(secured.fleet / "reader", secured.fleet)
    metrics = httpx.get(f"https://{secured.beside[other].ready['metrics']}/metrics", verify=reader).text
    of_engine = rf'engine="{other}:\d+",.*'
    assert re.search(rf"^laminar_relay_engine_connections{{{of_engine}}} [1-9]", metrics, re.MULTILINE), metrics
    counted = rf'^laminar_relay_engine_connections_refused_total{{{of_engine}reason="role"}} 1\.0$'
    assert re.search(counted, metrics, re.MULTILINE), metrics
    assert address_of(urls[other]) != address_of(secured.engines[other].ready["url"])
    without = [option for option in secured.options if not option.startswith("--credentials")]
    examined = CliRunner(env={CREDENTIALS_VARIABLE: ""}).invoke(gateway.cli.cli, ["doctor", "--port=0", *without])
    assert "CERTIFICATE_VERIFY_FAILED" in examined.output, examined.output
