"""What strangers at the port of metrics and health can hold: little, and they keep no probe out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import make_wsgi_app

from paramserver.daemon.health import Health, with_health
from paramserver.daemon.http_port import CONNECTIONS_MAX, serve_http

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
