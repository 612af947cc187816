"""Relay processes for tests, as a pytest plugin."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.links import Host
from tests.support.processes import Daemon, start

T = TypeVar("T")

LEASE_S = 6.0
"""Of relays here. Renewed each quarter of it: a machine that stands still for four seconds costs none its lease."""
SILENCE_S = 2.0
"""Of an upstream that is bypassed. In half a second, the default, a busy machine bypasses relays that live, and what a
test holds up at them comes past them."""

PATIENT = ("--lease-ttl-s", str(LEASE_S), "--silence-s", str(SILENCE_S))


class Relays:
    """Starts relays against one etcd; each has a small pool in shared memory, and is `PATIENT` with others."""

    def __init__(self, etcd: str, directory: Path, *, flags: Sequence[str] = PATIENT) -> None:
        """`flags`: every relay's, before its own; () leaves all at the defaults that users have."""
        self.etcd = etcd
        self.flags = flags
        self.directory = directory
        self.pools = Path(tempfile.mkdtemp(prefix="laminar-test-", dir="/dev/shm"))
        self.daemons: list[Daemon] = []

    def start(
        self,
        name: str,
        *flags: str,
        pool_bytes: str = "64MiB",
        on: Host | None = None,
        ready_within_s: float = 180.0,
    ) -> Daemon:
        """`on`: a host of `tests.support.links`, which it then listens on; else loopback."""
        daemon = start(
            f"relay-{name}-{len(self.daemons)}",
            [
                "paramserver",
                "serve",
                *("--name", name),
                *("--etcd", self.etcd),
                *("--pool-dir", str(self.pools / f"{name}-{len(self.daemons)}")),
                *("--pool-bytes", pool_bytes),
                *self.flags,
                *(("--host", on.address, "--insecure") if on else ()),
                *flags,
            ],
            self.directory,
            timeout_s=ready_within_s,
            prefix=on.prefix if on else (),
        )
        self.daemons.append(daemon)
        return daemon

    def close(self) -> None:
        """Ends those that still live, and fails when one does not end cleanly."""
        try:
            codes = {daemon.name: daemon.stop() for daemon in self.daemons if daemon.process.poll() is None}
        finally:  # one that does not end leaves neither the others nor their memory to the tests to come
            for daemon in self.daemons:
                if daemon.process.poll() is None:
                    daemon.kill()
            shutil.rmtree(self.pools)
        assert not any(codes.values()), codes


@pytest.fixture
def relays(etcd: str, tmp_path: Path) -> Iterator[Relays]:
    """A factory of relay processes, all ended with the test."""
    found = Relays(etcd, tmp_path)
    yield found
    found.close()


async def until(condition: Callable[[], Awaitable[T]], what: str, timeout_s: float = 180.0) -> T:
    """Polls until `condition` gives something true; fails naming `what`."""

    deadline = time.monotonic() + timeout_s
    while not (found := await condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(0.02)
    return found
