"""The wheel, in an environment without the checkout: its commands run, its daemons serve, the SDK works.

It is built from the files that `deploy/images/Containerfile` copies.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.setup_env import ROOT
from paramserver.daemon.health import LIVE_PATH, SERVING_PATH
from paramserver.daemon.process import SERVICE
from tests.support import wheels
from tests.support.processes import Daemon, await_ready
from tests.support.wheels import PACKAGES, python_of, run
from tests.support.words import tokenizer

pytestmark = pytest.mark.slow

SDK = """
import sys, numpy, trainer_client, paramserver.client, protos
assert all("site-packages" in module.__file__ for module in (trainer_client, paramserver.client, protos))
with trainer_client.Publisher(sys.argv[1]) as publisher:
    print(publisher.publish({"w": numpy.ones(4, numpy.float32)}, step=1, wait="sealed").version)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.built_from_checkout(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands."""
    return wheels.installed(wheel, tmp_path_factory.mktemp("installed") / "venv")


def test_the_wheel_has_the_packages_and_nothing_of_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    ours = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so", ".partial")
    }
    assert ours - set(names) == set()
    if shutil.which("cc") or shutil.which("gcc"):
        assert "paramserver/data/_stream.so" in names


@pytest.mark.parametrize("command", ["paramserver", "gateway", "agents-env"])
def test_a_command_of_the_wheel_runs_and_gives_its_version(installed: Path, tmp_path: Path, command: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(installed / command, "--version", cwd=tmp_path) == f"{command}, version {version}\n"
    assert "Usage:" in run(installed / command, "--help", cwd=tmp_path)


def started(installed: Path, directory: Path, name: str, *words: str | Path) -> Daemon:
    ready = f"--ready-file={directory / name}.ready.json"
    with (directory / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [installed / words[0], *words[1:], ready],
            cwd=directory,
            env={"PATH": "/usr/bin:/bin"},
            stdout=log,
            stderr=log,
        )
    daemon = Daemon(name, process, directory / f"{name}.log")
    await_ready(daemon, directory)
    return daemon


@pytest.fixture
def pool() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
    yield directory / "pool"
    shutil.rmtree(directory)


def health(address: str, service: str) -> str:
    with grpc.insecure_channel(address) as channel:
        checks = health_pb2_grpc.HealthStub(channel)
        answer = checks.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def test_its_daemons_serve_and_its_sdk_publishes(installed: Path, tmp_path: Path, shared_etcd: str, pool: Path) -> None:
    relay = ["--name=a", f"--etcd={shared_etcd}", "--port=0", f"--pool-dir={pool}", "--pool-bytes=64MiB"]
    relay.append("--metrics-port=0")
    first = started(installed, tmp_path, "relay", "paramserver", "serve", *relay)
    try:
        address = first.ready["grpc"]
        # The probes of deploy/kubernetes, and those of others over gRPC.
        answers = [
            httpx.get(f"http://{first.ready['metrics']}{path}", timeout=60) for path in (LIVE_PATH, SERVING_PATH)
        ]
        assert [(answer.status_code, answer.text) for answer in answers] == [(200, "ok\n")] * 2
        assert "laminar_relay_pool_bytes" in httpx.get(f"http://{first.ready['metrics']}/metrics", timeout=60).text
        assert [health(address, ""), health(address, SERVICE)] == ["SERVING", "SERVING"]
        assert run(python_of(installed.parent), "-I", "-c", SDK, address, cwd=tmp_path) == "1\n"
        model = tokenizer(tmp_path / "model")
        options = ["--model=policy", f"--tokenizer={model}", "--port=0", f"--data={tmp_path / 'data'}"]
        second = started(installed, tmp_path, "gateway", "gateway", "serve", *options, f"--relay={address}")
        try:
            shown = run(installed / "gateway", "status", "--url", second.ready["url"], cwd=tmp_path)
            assert "no engine serves" in " ".join(shown.split())
        finally:
            assert second.stop() == 0, second.log()[-3000:]
    finally:
        assert first.stop() == 0, first.log()[-3000:]
