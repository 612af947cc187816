"""What strangers at the port of metrics and health can hold: little, and they keep no probe out."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from wsgiref.handlers import BaseHandler

import pytest
from prometheus_client import make_wsgi_app

from paramserver.core.access import metrics_refusal
from paramserver.credentials.authority import Authority
from paramserver.credentials.fleet import Fleet
from paramserver.daemon.health import Health, with_health
from paramserver.daemon.http_port import CONNECTIONS_MAX, serve_http
from paramserver.daemon.metrics import for_tls_alone
from protos.access.credentials import Credentials
from protos.access.fleet import FLEET_ROLES, Identity
from protos.access.tls import FleetTls
from tests.support.engine_port import context_of
from tests.support.fleet_credentials import authority_of, write_holder

PATIENCE_S = 30.0
NUM_STRANGERS = 3 * CONNECTIONS_MAX


@pytest.fixture
def port() -> Iterator[int]:
    address, stop = serve_http("127.0.0.1", 0, with_health(make_wsgi_app(), Health()))
    yield int(address.rpartition(":")[2])
    stop()


@contextlib.contextmanager
def strangers(port: int, says: bytes) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(NUM_STRANGERS):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            sock.sendall(says)
            found.append(sock)
        yield found


def probe(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=PATIENCE_S) as answer:
        return bytes(answer.read())


def threads_end(num_max: int) -> None:
    """Those of connections that made way end a moment after these."""
    give_up = time.monotonic() + PATIENCE_S
    while (num := threading.active_count()) > num_max:
        assert time.monotonic() < give_up, f"{num} threads, at most {num_max} wanted"
        time.sleep(0.01)


@pytest.mark.parametrize("says", [b"", b"GET /healthz HTT", b"GET /healthz HTTP/1.1\r\nA: b\r\n"])
def test_strangers_that_stay_are_few_and_keep_no_probe_out(port: int, says: bytes) -> None:
    before = threading.active_count()
    with strangers(port, says) as found:
        assert probe(port) == b"ok\n"
        for sock in found[: NUM_STRANGERS - CONNECTIONS_MAX]:  # the oldest have made way
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        threads_end(before + CONNECTIONS_MAX + 1)
        assert probe(port) == b"ok\n"


def test_one_that_falls_silent_is_closed_and_not_logged(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paramserver.daemon.http_port._Handler.timeout", 0.05)
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        sock.sendall(b"GET /healthz HTT")
        assert sock.recv(1) == b""
    assert probe(port) == b"ok\n"
    assert capfd.readouterr().err == ""


def test_it_ends_with_connections_open() -> None:
    address, stop = serve_http("127.0.0.1", 0, with_health(make_wsgi_app(), Health()))
    with strangers(int(address.rpartition(":")[2]), b"") as found:
        stop()
        with contextlib.suppress(ConnectionResetError):
            assert found[-1].recv(1) == b""


# -- with credentials


@pytest.fixture
def secured(fleet: Path) -> Iterator[int]:
    tls = FleetTls(Credentials(fleet / "relay"), serving=True, refusal=metrics_refusal)
    address, stop = serve_http("127.0.0.1", 0, with_health(for_tls_alone(make_wsgi_app()), Health()), tls)
    yield int(address.rpartition(":")[2])
    stop()


def fetched(port: int, context: ssl.SSLContext | None) -> bytes:
    scheme = "http" if context is None else "https"
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/metrics", timeout=PATIENCE_S, context=context) as answer:
        return bytes(answer.read())


def ends(port: int, context: ssl.SSLContext) -> bool:
    """Whether the connection ends unanswered: by an alert, a reset or a broken pipe, as the two ends' timing has it."""
    with pytest.raises(OSError) as met:
        fetched(port, context)
    return not isinstance(met.value, urllib.error.HTTPError)


@pytest.mark.parametrize("role", FLEET_ROLES)
def test_metrics_are_for_holders_of_a_certificate(secured: int, fleet: Path, role: str) -> None:
    assert b"python_info" in fetched(secured, context_of(fleet / role, fleet))
    assert probe(secured) == b"ok\n", "probes have none"


def test_nobody_else_reads_metrics(secured: int, fleet: Path, tmp_path: Path) -> None:
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetched(secured, None)
    admin = Identity("admin", "a")
    strangers = [
        None,
        write_holder(tmp_path / "foreign", Authority.new(datetime.datetime.now(datetime.UTC)), admin, trusts=fleet),
        write_holder(tmp_path / "expired", authority_of(fleet), admin, trusts=fleet, days_ago=31),
        write_holder(tmp_path / "odd", authority_of(fleet), Identity("root", "a"), trusts=fleet),  # type: ignore[arg-type]
    ]
    for holder in strangers:
        assert ends(secured, context_of(holder, fleet))
    assert b"python_info" in fetched(secured, context_of(fleet / "reader", fleet))


def test_the_environment_of_the_process_makes_nothing_secure(
    secured: int, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wsgiref has a copy of it from its import on, and begins each request's with that."""
    monkeypatch.setitem(BaseHandler.os_environ, "HTTPS", "on")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetched(secured, None)
    assert fetched(secured, context_of(fleet / "reader", fleet))


@pytest.mark.parametrize("says", [b"\x16", b"\x16\x03\x01\x40\x00" + bytes(99)])
def test_half_handshakes_keep_nobody_out(secured: int, fleet: Path, says: bytes) -> None:
    before = threading.active_count()
    with strangers(secured, says):
        assert probe(secured) == b"ok\n"
        assert b"python_info" in fetched(secured, context_of(fleet / "reader", fleet))
        threads_end(before + CONNECTIONS_MAX + 1)


def test_a_handshake_has_its_time_as_a_whole(secured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.daemon.http_port._Handler.timeout", 0.2)
    with socket.create_connection(("127.0.0.1", secured), PATIENCE_S) as sock:
        sock.sendall(b"\x16")
        assert sock.recv(1) == b""


def test_replaced_certificates_count_for_the_next_connection(own_fleet: Path, tmp_path: Path) -> None:
    credentials = Credentials(own_fleet / "relay")
    tls = FleetTls(credentials, serving=True, refusal=metrics_refusal)
    address, stop = serve_http("127.0.0.1", 0, for_tls_alone(make_wsgi_app()), tls)
    port = int(address.rpartition(":")[2])
    try:
        former = context_of(shutil.copytree(own_fleet / "reader", tmp_path / "former"), own_fleet)
        assert fetched(port, former)
        for _ in range(3):
            Fleet(own_fleet).rotate(30)
            credentials.refresh()
        assert ends(port, former)
        assert fetched(port, context_of(own_fleet / "reader", own_fleet))
    finally:
        stop()
