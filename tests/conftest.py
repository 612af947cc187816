"""Fixtures that more than one folder uses; each lives beside what it starts, in `tests/support`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A slow machine, or a busy one, is no fault of what is tested: pytest's own time limit ends what hangs.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

# skips comes first: the others import it, and pytest wants to import its plugins itself
pytest_plugins = ["tests.support.skips", "tests.support.etcd", "tests.support.ports", "tests.support.relays"]


@pytest.fixture(autouse=True)
def _the_root_loggers_level() -> Iterator[None]:
    """A command that runs in this process sets it; the next test's `caplog` would have the libraries' lines, too."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
