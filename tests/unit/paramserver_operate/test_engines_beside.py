"""The engines beside a relay: how options name them, which get a port in front of them, and what gateways learn."""

from __future__ import annotations

import dataclasses
import logging
import socket
from pathlib import Path

import pytest

from paramserver.cli_views import show_status
from paramserver.client.relay import EnginePortStatus
from paramserver.config import EngineBeside, RelayConfig
from paramserver.daemon.engines import opened_engine_ports, registered
from protos.access.credentials import Credentials
from protos.errors import Conflict, InvalidRequest
from tests.unit.paramserver_operate.test_views import STATUS

POOL = Path("/dev/shm/laminar-test")


def config(*engines: str, credentials: Path | None = None) -> RelayConfig:
    beside = tuple(map(EngineBeside.parse, engines))
    return RelayConfig("r", "etcd:1", host="127.0.0.1", pool_dir=POOL, engines=beside, credentials=credentials)


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("vllm=http://127.0.0.1:8000", EngineBeside("vllm", "http://127.0.0.1:8000")),
        ("vllm=http://127.0.0.1:8000@8443", EngineBeside("vllm", "http://127.0.0.1:8000", 8443)),
        ("vllm=http://127.0.0.1:8000@0", EngineBeside("vllm", "http://127.0.0.1:8000", 0)),
        ("sglang=http://localhost:1/base/@65535", EngineBeside("sglang", "http://localhost:1/base", 65535)),
        ("vllm=http://me@engines-0:8000", EngineBeside("vllm", "http://me@engines-0:8000")),
    ],
)
def test_an_engine_is_named_with_or_without_a_port(text: str, engine: EngineBeside) -> None:
    assert EngineBeside.parse(text) == engine


@pytest.mark.parametrize("text", ["", "vllm", "vllm=", "vllm=@8443", "vllm=http://h:8000@65536", "=http://h:8000@1"])
def test_what_names_no_engine_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not KIND=URL"):
        EngineBeside.parse(text)


@pytest.mark.parametrize(
    ("engine", "has_credentials", "words"),
    [
        (
            "vllm=http://127.0.0.1:8000@8443",
            False,
            r"is for one on loopback, at a relay with credentials .*--credentials",
        ),
        ("vllm=http://10.0.0.1:8000@8443", True, r"is for one on loopback.*http://127\.0\.0\.1:8000"),
        ("vllm=https://127.0.0.1:8000", True, "the port in front of it has TLS, and the engine none .*plain http"),
    ],
)
def test_a_port_where_there_can_be_none_is_refused(engine: str, has_credentials: bool, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        config(engine, credentials=Path("/credentials") if has_credentials else None)


def test_without_credentials_engines_are_registered_as_they_are() -> None:
    found = config("vllm=http://127.0.0.1:8000", "sglang=https://localhost:30000", "embedded=http://10.0.0.1:80")
    assert [(one.name, one.url) for one in registered(found, {}, "r:7070")] == [
        ("r:8000", "http://127.0.0.1:8000"),
        ("r:30000", "https://localhost:30000"),
        ("r:80", "http://10.0.0.1:80"),
    ]


async def test_engines_on_loopback_are_registered_by_their_ports(fleet: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = config(
        "vllm=http://127.0.0.1:8000",
        "sglang=http://localhost:30000/v",
        "embedded=http://10.0.0.1:80",
        credentials=fleet,
    )
    async with opened_engine_ports(found, Credentials(fleet / "relay")) as ports:
        assert list(ports) == ["r:8000", "r:30000"]
        engines = {one.name: one for one in registered(found, ports, "r:7070")}
        first, second = (ports[name].statistics().url for name in ports)
        assert (engines["r:8000"].url, engines["r:30000"].url) == (first, second)
        assert first.startswith("https://127.0.0.1:")
        assert second.endswith("/v")
        assert engines["r:80"].url == "http://10.0.0.1:80"
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "engine r:80 at http://10.0.0.1:80 takes whoever reaches it: let it listen on loopback"
    )
    assert f"engine r:8000 is called at {first}, on this host at http://127.0.0.1:8000" in caplog.text


async def test_without_credentials_no_port_is_opened() -> None:
    async with opened_engine_ports(config("vllm=http://127.0.0.1:8000"), None) as ports:
        assert ports == {}


async def test_a_port_that_is_taken_refuses_the_start_and_leaves_none_open(fleet: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = config("vllm=http://127.0.0.1:1", f"vllm=http://127.0.0.1:2@{port}", credentials=fleet)
        with pytest.raises(Conflict, match=f"cannot listen on 127.0.0.1:{port} for an engine"):
            async with opened_engine_ports(found, Credentials(fleet / "relay")):
                raise AssertionError("one of them is taken")


def test_the_status_shows_ports_with_what_they_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {"handshake": 3, "role": 1, "connections": 0, "engine": 0}
    port = EnginePortStatus("r:8000", "https://h:8443", "http://127.0.0.1:8000", 12, 0, 40, refused)
    show_status(dataclasses.replace(STATUS, engine_ports=(port,)), as_json=False)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("engine r:8000"))
    assert line == (
        "engine r:8000 at https://h:8443, which leads to http://127.0.0.1:8000: 12 connections, "
        "refused 3 by handshake, 1 by role"
    )
