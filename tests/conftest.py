"""Fixtures that more than one folder uses; each lives beside what it starts, in `tests/support`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

# A slow machine, or a busy one, is no fault of what is tested: pytest's own time limit ends what hangs.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("any-machine"), max_examples=20)  # of `make quick`
settings.load_profile("any-machine")

# Nor is it one of httpx's: a call that names no timeout has 5 s, less than a busy machine may stand still.
for part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, part, 60.0)

# skips comes first: the others import it, and pytest wants to import its plugins itself
pytest_plugins = [
    "tests.support.skips",
    "tests.support.etcd",
    "tests.support.fleet_credentials",
    "tests.support.guarded_etcd",
    "tests.support.open_directory",
    "tests.support.ports",
    "tests.support.quick",
    "tests.support.postgres_servers",
    "tests.support.redis_servers",
    "tests.support.shared_stores",
    "tests.support.standby_pairs",
    "tests.support.relays",
    "tests.support.shared_cas",
    "tests.support.unretrieved",
]


@pytest.fixture(autouse=True)
def _the_root_loggers_level() -> Iterator[None]:
    """A command that runs in this process sets it; the next test's `caplog` would have the libraries' lines, too."""
    level = logging.getLogger().level
    yield
    if logging.getLogger().level != level:  # to set it empties the cache of every logger of every library
        logging.getLogger().setLevel(level)
