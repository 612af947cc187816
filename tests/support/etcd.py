"""A real etcd for tests, as a pytest plugin: `pytest_plugins = ["tests.support.etcd", "tests.support.relays"]`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Daemon, start


def start_etcd(directory: Path, name: str = "etcd") -> Daemon:
    """`paramserver etcd` in a process of its own; its address is `ready["etcd"]`."""
    return start(name, ["paramserver", "etcd", "--log-level", "warning"], directory)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """ "host:port" of an empty etcd that only this test uses."""
    daemon = start_etcd(tmp_path)
    yield daemon.ready["etcd"]
    assert daemon.stop() == 0


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """ "host:port" of an etcd that the tests of one module share."""
    daemon = start_etcd(tmp_path_factory.mktemp("etcd"))
    yield daemon.ready["etcd"]
    assert daemon.stop() == 0
