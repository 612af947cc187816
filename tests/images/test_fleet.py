"""The compose file as it stands, under Docker: keys and credentials, a turn, a new version, doctors, nobody is root."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.setup_env import ROOT
from tests.images.docker import Docker

pytestmark = [pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(1200)]

FOLDER = ROOT / "deploy/compose"
SERVES_S = 180.0
RUNNING = ("etcd", "host", "relay", "engine", "gateway")
TURN = """
import json, sys, urllib.request
turn = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
head = {"Authorization": f"Bearer {sys.argv[1]}", "Content-Type": "application/json"}
asked = urllib.request.Request("http://127.0.0.1:8080/v1/chat/completions", json.dumps(turn).encode(), head)
print(urllib.request.urlopen(asked, timeout=120).read().decode())
"""
PUBLISH = """
import safetensors.numpy, trainer_client
tensors = safetensors.numpy.load_file("/models/policy/model.safetensors")
with trainer_client.Publisher("relay:7070") as publisher:
    print(publisher.publish(tensors, step=1, wait="sealed").version)
"""


class Fleet:
    """The services of the compose file."""

    def __init__(self, docker: Docker, model: Path) -> None:
        self.docker = docker
        self._variables = {"MODEL_DIR": str(model), "POOL_BYTES": "64MiB", "ENGINE_OPTIONS": "--dtype float32"}
        # Debian's docker-compose is the last one of version 1, which does not know `name`.
        self._file = re.sub(r"^name: .*\n", "", (FOLDER / "compose.yaml").read_text(), flags=re.MULTILINE)

    def compose(self, *words: str) -> str:
        start = ("docker-compose", "--project-name", "laminar", "--project-directory", str(FOLDER), "--file", "-")
        return self.docker.run(*start, *words, stdin=self._file, **self._variables).stdout

    def on(self, service: str, *words: str, **variables: str) -> str:
        """What a command prints in the container of a service."""
        given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        return self.docker.run("docker", "exec", *given, f"laminar_{service}_1", *words).stdout

    def key(self, role: str) -> str:
        return self.on("gateway", "gateway", "keys", "get", "/data/keys", role).strip()

    def await_version(self, version: int) -> None:
        """Until the engine serves it. `up` does not wait for the gateway, so first there is no status."""
        deadline = time.monotonic() + SERVES_S
        key = f"LAMINAR_API_KEY={self.key('reader')}"
        status = ("docker", "exec", "--env", key, "laminar_gateway_1", "gateway", "status")
        serves = re.compile(rf"^relay:8000 +embedded +serving +{version} ", re.MULTILINE)
        while not serves.search((found := self.docker.run(*status, check=False)).stdout):
            said = found.stdout + found.stderr
            assert time.monotonic() < deadline, said + self.compose("logs", "--no-color", "--tail=50")
            time.sleep(0.5)


@pytest.fixture(scope="module")
def fleet(docker: Docker, model: Path) -> Iterator[Fleet]:
    found = Fleet(docker, model)
    found.compose("up", "--no-build", "--detach")
    try:
        found.await_version(0)
        yield found
    finally:
        found.compose("down", "--volumes", "--timeout", "20")


def test_a_turn_is_answered_at_the_published_port(fleet: Fleet) -> None:
    answer = json.loads(fleet.docker.inside(sys.executable, "-c", TURN, fleet.key("agent")))
    print("a turn:", answer["usage"], answer["choices"][0]["finish_reason"])
    assert answer["usage"]["completion_tokens"] == 5


def test_a_trainer_with_the_volumes_publishes_and_the_engine_loads(fleet: Fleet, model: Path) -> None:
    volumes = ("laminar_fleet:/fleet:ro", "laminar_pool:/run/laminar", f"{model}:/models/policy:ro")
    options = [word for volume in volumes for word in ("--volume", volume)]
    options += ["--env", "LAMINAR_CREDENTIALS=/fleet/trainer", "--network", "laminar_default", "--read-only"]
    run = ("docker", "run", "--rm", "--tmpfs", "/tmp", "--env", "HOME=/tmp", *options, "laminar-engine")
    assert fleet.docker.run(*run, "python3", "-c", PUBLISH).stdout.split() == ["1"]
    fleet.await_version(1)


def test_the_relay_answers_its_own_credentials_alone(fleet: Fleet) -> None:
    status = fleet.on(
        "relay", "paramserver", "status", "--relay", "127.0.0.1:7070", LAMINAR_CREDENTIALS="/credentials/relay"
    )
    print(status)
    assert "engine relay:8000 at https://relay:8443" in status
    refused = fleet.docker.run(
        "docker", "exec", "laminar_relay_1", "paramserver", "status", "--relay", "127.0.0.1:7070", check=False
    )
    assert refused.returncode != 0
    assert "LAMINAR_CREDENTIALS" in refused.stderr


def test_the_doctors_examine_their_containers(fleet: Fleet) -> None:
    pool = ("--pool-dir", "/run/laminar/pool", "--pool-bytes", "64MiB")
    relay = fleet.docker.run("docker", "exec", "laminar_relay_1", "paramserver", "doctor", *pool, check=False).stdout
    options = ("--model", "policy", "--tokenizer", "/models/policy", "--data", "/data/gateway", "--etcd", "etcd:2379")
    gateway = fleet.docker.run("docker", "exec", "laminar_gateway_1", "gateway", "doctor", *options, check=False).stdout
    print(relay, gateway, sep="\n")
    assert re.search(r"^ok +pool directory in memory: /run/laminar/pool is on tmpfs", relay, re.MULTILINE)
    assert re.search(r"^ok ", gateway, re.MULTILINE)


@pytest.mark.parametrize("service", RUNNING)
def test_nothing_is_root_or_writes_its_root(fleet: Fleet, service: str) -> None:
    status = fleet.on(service, "sh", "-c", "cat /proc/[0-9]*/status; touch /written 2>&1 || true")
    users = set(re.findall(r"^Uid:\s+(.+)$", status, re.MULTILINE))
    assert {user for line in users for user in line.split()} == {"10001"}
    assert set(re.findall(r"^CapEff:\s+(\S+)$", status, re.MULTILINE)) == {"0" * 16}
    assert set(re.findall(r"^NoNewPrivs:\s+(\d)$", status, re.MULTILINE)) == {"1"}
    assert "Read-only file system" in status


def test_health_checks_pass(fleet: Fleet) -> None:
    """They are run again every 30 s."""
    deadline = time.monotonic() + SERVES_S
    template = "{{.State.Health.Status}}"
    for service in ("relay", "gateway"):
        command = ("docker", "inspect", "--format", template, f"laminar_{service}_1")
        while (found := fleet.docker.run(*command).stdout.strip()) != "healthy":
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
