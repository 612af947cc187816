"""A real etcd for tests, as a pytest plugin: `pytest_plugins = ["tests.support.etcd", "tests.support.relays"]`.

A process of tests starts at most two, and empties them: to start one takes longer than many of the tests do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.processes import Daemon, start


def start_etcd(directory: Path, name: str = "etcd") -> Daemon:
    """`paramserver etcd` in a process of its own; its address is `ready["etcd"]`."""
    return start(name, ["paramserver", "etcd", "--log-level", "warning"], directory)


def emptied(daemon: Daemon) -> str:
    """Its address, once it has no key. The store's own name goes, too, so relays take it for a new one."""
    endpoint: str = daemon.ready["etcd"]
    every_key = {"key": "AA==", "range_end": "AA=="}  # a zero byte each, in the base64 of etcd's JSON
    httpx.post(f"http://{endpoint}/v3/kv/deleterange", json=every_key, timeout=60.0).raise_for_status()
    return endpoint


@pytest.fixture(scope="session")
def _etcd_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = start_etcd(tmp_path_factory.mktemp("etcd"))
    yield daemon
    assert daemon.stop() == 0


@pytest.fixture(scope="session")
def _etcd_of_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = start_etcd(tmp_path_factory.mktemp("etcd"))
    yield daemon
    assert daemon.stop() == 0


@pytest.fixture
def etcd(_etcd_of_tests: Daemon) -> str:
    """ "host:port" of an empty etcd that nobody uses besides this test, which may not stop it."""
    return emptied(_etcd_of_tests)


@pytest.fixture(scope="module")
def shared_etcd(_etcd_of_modules: Daemon) -> str:
    """ "host:port" of an etcd, empty at first, that the tests of one module share."""
    return emptied(_etcd_of_modules)
