"""A real PostgreSQL for tests, as a pytest plugin that `tests/conftest.py` loads.

The server refuses to run as root: then it runs as the user `postgres` of Debian's package, in a folder of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from gateway.core.addresses import PostgresAddress
from gateway.log.postgres import PostgresStore
from tests.support.ports import KeptPorts
from tests.support.skips import needs

USER: str | None = "postgres" if os.geteuid() == 0 else None
SETTINGS: Mapping[str, str] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "16MB",
    "dynamic_shared_memory_type": "mmap",  # files of its folder, which a killed one leaves there
    "max_connections": "60",
    "wal_sender_timeout": "5s",
}


@cache
def _binaries() -> Path | None:
    return next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)


def _run(program: str, *arguments: str) -> None:
    binaries = _binaries()
    assert binaries is not None
    subprocess.run([binaries / program, *arguments], check=True, user=USER, capture_output=True, cwd="/", timeout=180)


@dataclass
class PostgresServer:
    """`url`: its address, with a database of its own. A killed one has what it had when it is started again."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"postgresql://laminar@127.0.0.1:{self.port}/postgres"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def make(self) -> None:
        self.end()
        options = ("--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")
        _run("initdb", "--pgdata", str(self.data), "--username=laminar", *options)

    def start(self, **settings: str) -> None:
        """Ready for connections, or recovering, when it returns."""
        binaries = _binaries()
        assert binaries is not None
        words = [word for name, value in {**SETTINGS, **settings}.items() for word in ("-c", f"{name}={value}")]
        deadline = time.monotonic() + 180
        while True:
            with (self.folder / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    [binaries / "postgres", "-D", str(self.data), "-p", str(self.port), *words],
                    stdout=log, stderr=log, user=USER, cwd="/", start_new_session=True,
                )  # fmt: skip
            while self.process.poll() is None:
                if self._answers():
                    return
                time.sleep(0.02)
            # The children of a killed one may hold its memory for a moment.
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def _answers(self) -> bool:
        """Not alone that it listens: what it says to a connection while it starts is an error."""
        try:
            _run("pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port))
        except subprocess.CalledProcessError:
            return False
        return True

    def make_standby_of(self, primary: PostgresServer, name: str) -> None:
        """A copy of the running primary, which follows it under `name`."""
        self.end()
        where = f"host=127.0.0.1 port={primary.port} user=laminar application_name={name}"
        options = ("--checkpoint=fast", "--wal-method=stream", "--write-recovery-conf", "--no-sync")
        _run("pg_basebackup", "--pgdata", str(self.data), "--dbname", where, *options)

    def promote(self) -> None:
        _run("pg_ctl", "promote", "--pgdata", str(self.data), "--wait")

    def kill(self) -> None:
        """kill -9 of all of its processes."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def end(self) -> None:
        """It has nothing any more: no data, and no memory, which the machine keeps of a killed one."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(timeout=180)
        with contextlib.suppress(FileNotFoundError):
            _, _, _, _, _, _, memory, *_ = (self.data / "postmaster.pid").read_text().splitlines()
            subprocess.run(["ipcrm", "--shmem-id", memory.split()[1]], check=False, capture_output=True)
        shutil.rmtree(self.data, ignore_errors=True)


Servers = Callable[[str], PostgresServer]


@pytest.fixture(scope="module")
def _postgres_folder() -> Iterator[Path]:
    if _binaries() is None:
        pytest.skip(needs("no PostgreSQL server", "make system-packages"))
    folder = Path(tempfile.mkdtemp(prefix="laminar-postgres-"))
    if USER is not None:
        shutil.chown(folder, USER)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _servers(folder: Path) -> Iterator[Servers]:
    made: dict[str, PostgresServer] = {}
    with KeptPorts() as ports:

        def make(name: str = "primary") -> PostgresServer:
            """Not started. The same name again is the same server."""
            if name not in made:
                place = folder / f"{ports.of(name)}-{name}"
                place.mkdir()
                if USER is not None:
                    shutil.chown(place, USER)
                made[name] = PostgresServer(place, ports.of(name))
            return made[name]

        yield make
        for server in made.values():
            server.end()


@pytest.fixture
def postgres_servers(_postgres_folder: Path) -> Iterator[Servers]:
    """Servers of one test, each with a port of its own that it keeps over restarts."""
    yield from _servers(_postgres_folder)


@pytest.fixture(scope="module")
def shared_postgres(_postgres_folder: Path) -> Iterator[str]:
    """The address of a server that the tests of one module share, each in a namespace of its own."""
    for make in _servers(_postgres_folder):
        server = make("shared")
        server.make()
        server.start()
        yield server.url


async def connect(stack: AsyncExitStack, url: str, namespace: str) -> PostgresStore:
    """`stack` closes it."""
    store = await PostgresStore.connect(PostgresAddress.parse(url), namespace=namespace)
    stack.push_async_callback(store.close)
    return store


__all__: Sequence[str] = ["PostgresServer", "Servers", "connect"]
