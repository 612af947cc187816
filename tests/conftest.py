"""Fixtures that more than one folder uses; each lives beside what it starts, in `tests/support`."""

# skips comes first: the others import it, and pytest wants to import its plugins itself
pytest_plugins = ["tests.support.skips", "tests.support.etcd", "tests.support.relays"]
