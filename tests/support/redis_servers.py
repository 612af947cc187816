"""A real Redis for tests, as a pytest plugin that `tests/conftest.py` loads."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from gateway.core.addresses import RedisAddress
from gateway.log.durability import SETTINGS
from gateway.log.redis import RedisStore
from tests.support.ports import KeptPorts
from tests.support.processes import Daemon
from tests.support.skips import needs

DURABLE = {setting.name: setting.wanted for setting in SETTINGS}
BINARY = shutil.which("redis-server", path=f"{os.environ.get('PATH', '')}:/usr/local/bin:/usr/bin:/usr/sbin")
_numbers = itertools.count()


def start_redis(
    directory: Path,
    port: int,
    settings: Mapping[str, str] = DURABLE,
    name: str = "redis",
    *,
    rename: str = "",
    arguments: Sequence[str] = (),
) -> Daemon:
    """A redis-server whose files are in `directory`; started there again, it has what it had. It answers, or loads its
    file, when this returns. `rename`: a command that it is to lack. `arguments`: behind its configuration."""
    if BINARY is None:
        pytest.skip(needs("no redis-server", "make system-packages"))
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"{name}.log"
    lines = {"port": str(port), "bind": "127.0.0.1", "dir": str(directory), "save": '""', "daemonize": "no", **settings}
    text = "".join(f"{key} {value}\n" for key, value in lines.items())
    path = directory / f"{name}.conf"
    path.write_text(text + (f'rename-command {rename} ""\n' if rename else ""))
    with log.open("ab") as out:
        process = subprocess.Popen([BINARY, str(path), *arguments], stdout=out, stderr=out)
    daemon = Daemon(name, process, log, {"url": f"redis://127.0.0.1:{port}/0"})
    _await_port(daemon, port)
    return daemon


def _await_port(daemon: Daemon, port: int) -> None:
    deadline = time.monotonic() + 180
    while daemon.process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
            return
        except OSError:
            time.sleep(0.01)
    daemon.kill()
    raise AssertionError(f"redis-server does not listen:\n{daemon.log()[-2000:]}")


async def connect(stack: contextlib.AsyncExitStack, url: str, namespace: str) -> RedisStore:
    """`stack` closes it."""
    server = await RedisStore.connect(RedisAddress.parse(url), namespace=namespace)
    stack.push_async_callback(server.close)
    return server


@pytest.fixture
def redis_servers(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts servers, each with a port of its own that it keeps over restarts: `redis_servers(name=, settings=)`."""
    started: list[Daemon] = []
    with KeptPorts() as ports:

        def make(name: str = "redis", **options: object) -> Daemon:
            started.append(start_redis(tmp_path / name, ports.of(name), name=name, **options))  # type: ignore[arg-type]
            return started[-1]

        yield make
        for daemon in started:
            if daemon.process.poll() is None:
                daemon.kill()


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a durable Redis that the tests of one module share, each in a namespace of its own."""
    with KeptPorts() as ports:
        daemon = start_redis(tmp_path_factory.mktemp("redis"), ports.of("redis"))
        yield daemon.ready["url"]
        daemon.kill()


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test of this process uses."""
    return f"test-{os.getpid()}-{next(_numbers)}"
