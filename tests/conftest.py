"""Fixtures that more than one folder uses; each lives beside what it starts, in `tests/support`."""

pytest_plugins = ["tests.support.etcd", "tests.support.relays"]
