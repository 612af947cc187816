"""What every daemon does the same way: a log that repeats nothing, and cores counted as a container has them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from protos.foreign_text import OneLine
from protos.process import REPEATS_AFTER_S, Seldom, usable_cores


def record(name: str, line: int, at: float) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.WARNING, "watch.py", line, "trying again", None, None)
    made.created = at
    return made


def test_what_repeats_is_said_once_in_a_while_and_nothing_else_is_held_back() -> None:
    seldom = Seldom("etcd3aio")
    assert seldom.filter(record("etcd3aio.watch", 1, 1000.0))
    assert not seldom.filter(record("etcd3aio.watch", 1, 1001.0))
    assert seldom.filter(record("etcd3aio.watch", 2, 1001.0)), "another line of code"
    assert all(seldom.filter(record("gateway.turns.running", 1, 1001.0)) for _ in range(3))
    assert seldom.filter(record("etcd3aio.watch", 1, 1000.0 + REPEATS_AFTER_S))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000\n", 4), ("150000 100000\n", 2), ("40000 100000", 1), ("800000 100000\n", 4), ("odd", 4), (None, 4)],
)
def test_a_containers_share_of_processor_time_counts_as_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    assert usable_cores(file) == cores


def test_what_others_say_of_themselves_forges_no_line_and_fills_no_log() -> None:
    formatter = OneLine("%(levelname)s %(message)s")

    def line(words: str) -> str:
        return formatter.format(logging.LogRecord("x", logging.INFO, __file__, 1, "pin of %s", (words,), None))

    assert line("a\nERROR all is lost\x1b[2J\u2028") == "INFO pin of a\\nERROR all is lost\\x1b[2J\\u2028"
    assert len(line("n" * 30_000_000)) < 10_000
    assert line("Schlüssel 鍵") == "INFO pin of Schlüssel 鍵"
    assert line("a\u202eb\ud800") == "INFO pin of a\\u202eb\\ud800"


def test_a_traceback_forges_no_line_either() -> None:
    formatter = OneLine("%(levelname)s %(message)s")
    try:
        raise ValueError("it said\n2026-11-24T00:00:00.000 ERROR   gateway: all is lost\r\x1b[2J" + "n" * 1_000_000)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "it failed", (), sys.exc_info())
    head, *rest = formatter.format(record).split("\n")
    assert head == "ERROR it failed"
    assert [line for line in rest if not line.startswith("  ")] == []
    assert len("".join(rest)) < 40_000
    assert "\x1b" not in "".join(rest)
