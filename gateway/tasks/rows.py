"""The prompt pool on disk: its tables and the operations on them, which run in the database's thread.

Invariants:
- each operation costs the same with ten tasks and with a million: what it looks for stands first in an index that the
  statement names (`INDEXED BY` fails rather than scan). Adding and `count` read whole indexes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import zstandard

from gateway.core.tasks import RESTART_GRACE_S, NewTask, PoolCounts, TaskResult
from protos.decoding import decode_msgpack
from protos.errors import Corrupt, OutOfCapacity

FREE, LEASED, FINISHED, GIVEN_UP = range(4)
"""States of a sample."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS tasks(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, pool TEXT NOT NULL, task_id TEXT NOT NULL, data BLOB NOT NULL,
    priority REAL NOT NULL, group_size INTEGER NOT NULL, repeats INTEGER NOT NULL, attempts_max INTEGER NOT NULL,
    rounds INTEGER NOT NULL DEFAULT 0, open_groups INTEGER NOT NULL DEFAULT 0, ready INTEGER NOT NULL DEFAULT 1,
    result_number INTEGER, result TEXT, UNIQUE(pool, task_id));
CREATE INDEX IF NOT EXISTS tasks_ready ON tasks(pool, priority DESC, rounds, seq) WHERE ready=1;
CREATE INDEX IF NOT EXISTS tasks_results ON tasks(pool, result_number) WHERE result_number IS NOT NULL;
CREATE TABLE IF NOT EXISTS task_groups(
    number INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL, task_seq INTEGER NOT NULL, pool TEXT NOT NULL,
    round INTEGER NOT NULL, group_size INTEGER NOT NULL, unended INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS task_groups_of ON task_groups(task_seq);
CREATE INDEX IF NOT EXISTS task_groups_in ON task_groups(pool);
CREATE TABLE IF NOT EXISTS task_samples(
    group_number INTEGER NOT NULL, sample_index INTEGER NOT NULL, pool TEXT NOT NULL, state INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0, lease_id TEXT, request TEXT,
    runner TEXT NOT NULL DEFAULT '', until_unix_s REAL, reward REAL, error TEXT NOT NULL DEFAULT '',
    PRIMARY KEY(group_number, sample_index)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS task_samples_free ON task_samples(pool, group_number, sample_index) WHERE state=0;
CREATE INDEX IF NOT EXISTS task_samples_leased ON task_samples(until_unix_s) WHERE state=1;
CREATE UNIQUE INDEX IF NOT EXISTS task_samples_lease ON task_samples(lease_id) WHERE lease_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS task_samples_request ON task_samples(request) WHERE request IS NOT NULL;
CREATE TABLE IF NOT EXISTS task_ends(
    number INTEGER PRIMARY KEY AUTOINCREMENT, lease_id TEXT NOT NULL UNIQUE, how TEXT NOT NULL,
    retried INTEGER NOT NULL, group_ended INTEGER NOT NULL, reward REAL)
"""

_TABLES = ("tasks", "task_groups", "task_samples", "task_ends", "sqlite_sequence")
"""The last one has the numbers that SQLite gave out."""
_PART_ROWS = 10_000

NEXT_FREE = (
    "SELECT group_number, sample_index FROM task_samples INDEXED BY task_samples_free WHERE pool=? AND state=0 "
    "ORDER BY group_number, sample_index LIMIT 1"
)
NEXT_READY = (
    "SELECT seq, group_size, repeats, rounds FROM tasks INDEXED BY tasks_ready WHERE pool=? AND ready=1 "
    "ORDER BY priority DESC, rounds, seq LIMIT 1"
)
EXPIRED = (
    "SELECT group_number, sample_index, lease_id, failures FROM task_samples INDEXED BY task_samples_leased "
    "WHERE state=1 AND until_unix_s<=? ORDER BY until_unix_s LIMIT 1000"
)
"""The limit keeps one request short after many runners died at once; the next one takes the rest."""
OF_LEASE = (
    "SELECT group_number, sample_index, state, failures FROM task_samples INDEXED BY task_samples_lease "
    "WHERE lease_id=?"
)
"""A lease's sample: leased, or free because the lease expired."""
LIVE = (
    "SELECT group_id, sample_index FROM task_samples INDEXED BY task_samples_leased "
    "JOIN task_groups ON number=group_number WHERE state=1 AND until_unix_s>?"
)
"""Samples that runners have."""
OF_REQUEST = (
    "SELECT group_number, sample_index FROM task_samples INDEXED BY task_samples_request "
    "WHERE request=? AND pool=? AND runner=? AND state=1 ORDER BY group_number, sample_index"
)
RESULTS = (
    "SELECT result_number, task_id, priority, result FROM tasks INDEXED BY tasks_results "
    "WHERE pool=? AND result_number>? ORDER BY result_number LIMIT ?"
)
QUERIES = {
    NEXT_FREE: ("p",),
    NEXT_READY: ("p",),
    EXPIRED: (0.0,),
    LIVE: (0.0,),
    OF_LEASE: ("l",),
    OF_REQUEST: ("r", "p", "n"),
    RESULTS: ("p", 0, 1),
}
"""Those that run with each request, each with arguments: a test checks that none of them scans or sorts."""


def open_tables(connection: sqlite3.Connection, now: float) -> tuple[int, int]:
    """Makes the tables, and gives every lease time to be renewed. The number of tasks and of leases."""
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)
    connection.execute(
        "UPDATE task_samples SET until_unix_s=max(until_unix_s, ?) WHERE state=1", (now + RESTART_GRACE_S,)
    )
    return totals(connection)


def totals(connection: sqlite3.Connection) -> tuple[int, int]:
    """The number of tasks and of leases."""
    [tasks] = connection.execute("SELECT count(*) FROM tasks").fetchone()
    [leases] = connection.execute("SELECT count(*) FROM task_samples WHERE state=1").fetchone()
    return tasks, leases


def dump(connection: sqlite3.Connection) -> list[bytes]:
    """All rows, in compressed parts for `restore`."""
    parts, compress = list[bytes](), zstandard.ZstdCompressor().compress
    for table in _TABLES:
        found = connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2")  # noqa: S608 - of `_TABLES`
        while some := found.fetchmany(_PART_ROWS):
            parts.append(compress(msgspec.msgpack.encode((table, some))))
    return parts


def restore(connection: sqlite3.Connection, parts: Iterable[bytes]) -> tuple[int, int]:
    """Replaces all rows with those of a dump, or with none. The number of tasks and of leases."""
    open_tables(connection, 0.0)
    for table in _TABLES:
        connection.execute(f"DELETE FROM {table}")  # noqa: S608 - of `_TABLES`
    decompress = zstandard.ZstdDecompressor().decompress
    for part in parts:
        table, some = decode_msgpack(decompress(part), tuple[str, list[list[Any]]])
        if table not in _TABLES:
            raise Corrupt(f"a snapshot of the prompt pool has rows of {table[:40]!r}")
        if table == _TABLES[-1]:
            connection.execute(f"DELETE FROM {table}")  # noqa: S608 - what the rows before it made of it
        places = ",".join("?" * len(some[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({places})", some)  # noqa: S608 - checked above
    return totals(connection)


def add(connection: sqlite3.Connection, pool: str, tasks: Sequence[NewTask], tasks_max: int) -> int:
    """Adds those whose id the pool does not have; returns how many. OutOfCapacity beyond `tasks_max`: then none."""
    [before] = connection.execute("SELECT count(*) FROM tasks").fetchone()
    rows = [(pool, t.task_id, t.data, t.priority, t.group_size, t.repeats, t.attempts_max) for t in tasks]
    added = connection.executemany(
        "INSERT OR IGNORE INTO tasks(pool, task_id, data, priority, group_size, repeats, attempts_max) "
        "VALUES (?,?,?,?,?,?,?)",
        rows,
    ).rowcount
    if before + added > tasks_max:
        raise OutOfCapacity(
            f"the prompt pool has {before} of {tasks_max} tasks, and {added} more do not fit",
            hint="remove drained ones: POST /tasks/remove",
            retry_after_s=60.0,
        )
    return added


def results(connection: sqlite3.Connection, pool: str, after: int, limit: int) -> list[TaskResult]:
    return [
        TaskResult(number, task_id, priority=priority, **json.loads(result))
        for number, task_id, priority, result in connection.execute(RESULTS, (pool, after, limit))
    ]


def prioritize(connection: sqlite3.Connection, pool: str, priorities: Mapping[str, float]) -> list[str]:
    """Sets them; returns the ids that the pool does not have."""
    change = "UPDATE tasks SET priority=? WHERE pool=? AND task_id=?"
    return [
        task_id
        for task_id, priority in priorities.items()
        if not connection.execute(change, (priority, pool, task_id)).rowcount
    ]


def remove(connection: sqlite3.Connection, pool: str, task_ids: Sequence[str] | None) -> tuple[int, int]:
    """Removes tasks, or all drained ones (None), with their open groups. The number of tasks, and of leases lost."""
    gone = list(_to_remove(connection, pool, task_ids))
    lost = 0
    for seq in gone:
        groups = connection.execute("SELECT number FROM task_groups WHERE task_seq=?", (seq,)).fetchall()
        for (number,) in groups:
            [leased] = connection.execute(
                "SELECT count(*) FROM task_samples WHERE group_number=? AND state=1", (number,)
            ).fetchone()
            lost += leased
            connection.execute("DELETE FROM task_samples WHERE group_number=?", (number,))
            connection.execute("DELETE FROM task_groups WHERE number=?", (number,))
    connection.executemany("DELETE FROM tasks WHERE seq=?", [(seq,) for seq in gone])
    return len(gone), lost


def _to_remove(connection: sqlite3.Connection, pool: str, task_ids: Sequence[str] | None) -> Iterator[int]:
    if task_ids is None:
        drained = "SELECT seq FROM tasks WHERE pool=? AND ready=0 AND open_groups=0"
        yield from (seq for (seq,) in connection.execute(drained, (pool,)).fetchall())
        return
    for task_id in dict.fromkeys(task_ids):
        found = connection.execute("SELECT seq FROM tasks WHERE pool=? AND task_id=?", (pool, task_id)).fetchone()
        if found is not None:
            yield found[0]


def count(connection: sqlite3.Connection, pool: str) -> PoolCounts:
    def number(query: str) -> int:
        return int(connection.execute(f"SELECT count(*) FROM {query}", (pool,)).fetchone()[0])  # noqa: S608 - written below

    return PoolCounts(
        tasks=number("tasks WHERE pool=?"),
        ready=number("tasks INDEXED BY tasks_ready WHERE pool=? AND ready=1"),
        drained=number("tasks WHERE pool=? AND ready=0 AND open_groups=0"),
        open_groups=number("task_groups WHERE pool=?"),
        free=number("task_samples INDEXED BY task_samples_free WHERE pool=? AND state=0"),
        leased=number("task_samples WHERE pool=? AND state=1"),
    )
