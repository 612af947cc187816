"""Nets of namespaces: reachable, limited, cut, restored, and gone afterwards even when their maker was killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import links
from tests.support.links import Host, Net

pytestmark = pytest.mark.skipif(bool(links.missing()), reason=links.missing() or "available")

ROOT = Path(__file__).resolve().parents[3]
SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    sock, _ = server.accept()
    with sock:
        while sock.recv(1 << 20):
            pass
        sock.sendall(b"!")
"""


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(2) as made:
        yield made


@dataclass
class Servers:
    """Processes on hosts that take bytes until the sender is done, and then say so."""

    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __call__(self, host: Host) -> int:
        """Starts one; its port."""
        process = subprocess.Popen(
            [*host.prefix, sys.executable, "-c", SERVE, host.address], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.running.append(process)
        assert process.stdout is not None
        with process.stdout as lines:
            return int(lines.readline())


@pytest.fixture
def serve() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    for process in servers.running:
        process.kill()
        process.wait()


def send(host: Host, port: int, num_bytes: int, timeout_s: float = 10.0) -> float:
    """Seconds until the host has taken `num_bytes`; TimeoutError when it does not."""
    with socket.create_connection((host.address, port), timeout_s) as sock:
        started = time.monotonic()
        sock.sendall(bytes(num_bytes))
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b"!"
        return time.monotonic() - started


def parts_of(name: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [part for part in [*listed, *os.listdir("/sys/class/net")] if part.startswith(name)]


def test_a_rate_holds_and_can_be_lifted(net: Net, serve: Servers) -> None:
    host = net.hosts[0]
    port = serve(host)
    host.limit(200e6)
    limited = send(host, port, 4 << 20)
    host.limit(None)
    free = send(host, port, 4 << 20)
    ideal = (4 << 20) * 8 / 200e6
    assert 0.9 * ideal < limited < 2.5 * ideal
    assert free < limited
    assert host.bytes_received() > 8 << 20


@pytest.mark.parametrize("direction", ["both", "in", "out"])
def test_a_cut_cable_is_silent_until_it_is_restored(net: Net, serve: Servers, direction: links.Direction) -> None:
    host = net.hosts[1]
    port = serve(host)
    host.cut(direction)
    with pytest.raises(TimeoutError):
        send(host, port, 1000, timeout_s=0.5)
    host.restore()
    assert send(host, port, 1000) < 5.0


def test_hosts_reach_each_other_and_their_own_loopback(net: Net, serve: Servers) -> None:
    port = serve(net.hosts[0])
    code = f"import socket; socket.create_connection(({net.hosts[0].address!r}, {port}), 5); print('ok')"
    done = subprocess.run([*net.hosts[1].prefix, sys.executable, "-c", code], capture_output=True, check=False)
    assert done.stdout == b"ok\n", done.stderr


def test_everything_is_gone_after_with_and_processes_are_killed(serve: Servers) -> None:
    with Net(2) as net:
        serve(net.hosts[0])
        [process] = serve.running
        assert net.hosts[0].pids() == [process.pid]
        assert parts_of(net.name)
    assert parts_of(net.name) == []
    assert process.wait(60.0) == -signal.SIGKILL


def test_what_a_killed_maker_left_is_swept_by_the_next() -> None:
    code = (
        "from tests.support.links import Net; import sys, time\n"
        "net = Net(1); print(net.name, flush=True); time.sleep(60)"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert maker.stdout is not None
    with maker.stdout as lines:
        name = lines.readline().decode().strip()
    assert parts_of(name)
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    with Net(1):
        assert parts_of(name) == []


def test_two_nets_at_once_have_their_own_subnets() -> None:
    made: list[Net] = []

    def make() -> None:
        made.append(Net(1))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({net.subnet for net in made}) == 3
    finally:
        for net in made:
            net.close()
