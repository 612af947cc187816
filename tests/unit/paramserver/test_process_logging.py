"""Log lines of every daemon: a library that repeats itself is heard once a minute."""

from __future__ import annotations

import logging

from protos.process import REPEATS_AFTER_S, Seldom


def record(name: str, line: int, at: float) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.WARNING, "watch.py", line, "trying again", None, None)
    made.created = at
    return made


def test_what_repeats_is_said_once_in_a_while_and_nothing_else_is_held_back() -> None:
    seldom = Seldom("etcd3aio")
    assert seldom.filter(record("etcd3aio.watch", 1, 1000.0))
    assert not seldom.filter(record("etcd3aio.watch", 1, 1001.0))
    assert seldom.filter(record("etcd3aio.watch", 2, 1001.0)), "another line of code"
    assert all(seldom.filter(record("gateway.turns", 1, 1001.0)) for _ in range(3))
    assert seldom.filter(record("etcd3aio.watch", 1, 1000.0 + REPEATS_AFTER_S))
