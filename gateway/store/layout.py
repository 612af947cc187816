"""The layout of the gateway's data: its number stands in the file, so that no gateway misreads another's data.

Invariants:
- the layout is checked before anything else is done with the file;
- an older layout is migrated to this one in one transaction, or refused untouched; a newer one is refused.
"""

from __future__ import annotations

import secrets
import sqlite3

import msgspec

from gateway.store.damage import leaving_out
from protos import packed
from protos.decoding import decode_msgpack
from protos.errors import Conflict
from protos.trajectories import Trajectory

LAYOUT = 6
"""Layouts:
- 6: trajectories are packed, and their bodies stand apart from what is known of them (makes both tables anew);
- 5: a turn's row has only the part of its prompt that its parent's path lacks (adds a column);
- 4: turns are numbered in the order in which they ended (adds a column);
- 3: the model and the vocabulary of the ids (adds a table);
- 2: a journal that takes the tokens of all turns (adds a table);
- 1: ended and unrewarded sessions, rewards of turns, and groups;
- 0: before layouts were numbered."""

TRAJECTORIES = """
CREATE TABLE IF NOT EXISTS trajectories(
    seq INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL,
    oldest_version INTEGER NOT NULL, facts BLOB NOT NULL, uses INTEGER NOT NULL DEFAULT 0, lease_id TEXT);
CREATE TABLE IF NOT EXISTS trajectory_bodies(seq INTEGER PRIMARY KEY, body BLOB NOT NULL)"""
"""Made here, since layout 6 makes them anew; what they hold belongs to `gateway.experience`."""

_UNCOUNTED: dict[str, frozenset[str]] = {
    "turns": frozenset({"turn_id", "session_id", "request", "begun_unix_s", "outcome", "num_tokens", "ended_unix_s"}),
    "turn_parts": frozenset({"part", "turn_id", "token_ids", "logprobs", "top_logprobs"}),
    "turn_segments": frozenset({"turn_id", "position", "segment"}),
    "trajectories": frozenset({"seq", "session_id", "group_id", "oldest_version", "body", "lease_id"}),
    "closed_groups": frozenset({"group_id", "members"}),
    "leases": frozenset({"lease_id", "reader", "until_unix_s"}),
    "sessions": frozenset({"session_id", "spec", "api_key", "created_unix_s"}),
    "turn_messages": frozenset({"turn_id", "session_id", "head", "messages"}),
    "timeline": frozenset({"seq", "event"}),
}
"""The columns of the last layout without a number: the only one of those that can be migrated."""


def prepare(connection: sqlite3.Connection, name: str) -> None:
    """Migrates the file to this layout. Conflict, with advice, when that is impossible."""
    [found] = connection.execute("PRAGMA user_version").fetchone()
    if found > LAYOUT:
        raise Conflict(
            f"{name} was written by a newer gateway: its layout is {found}, and this one knows {LAYOUT}",
            hint="start that gateway again, or give another --data directory",
        )
    if found == LAYOUT:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if found == 0:
            _count(connection, name)
        _add_column(connection, "end_number")
        _add_column(connection, "num_inherited")
        _pack_trajectories(connection)
        connection.execute(f"PRAGMA user_version = {LAYOUT}")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def claim(connection: sqlite3.Connection, name: str, model: str, vocabulary: str) -> None:
    """Binds the file to the model and the vocabulary of its ids. Conflict when it has others."""
    connection.execute("CREATE TABLE IF NOT EXISTS kept_for(model TEXT NOT NULL, vocabulary TEXT NOT NULL)")
    found = connection.execute("SELECT model, vocabulary FROM kept_for").fetchone()
    if found is None:
        connection.execute("INSERT INTO kept_for VALUES (?,?)", (model, vocabulary))
    elif found[0] != model:
        raise Conflict(
            f"{name} keeps the turns of model {found[0]!r}, not of {model!r}",
            hint=f"serve --model {found[0]}, or give another --data directory",
        )
    elif found[1] != vocabulary:
        raise Conflict(
            f"{name} keeps token ids of another vocabulary",
            hint="give the --tokenizer that they were made with, or another --data directory",
        )


def gateway_name(connection: sqlite3.Connection) -> str:
    """By which other gateways know this one; it stays with the file."""
    connection.execute("CREATE TABLE IF NOT EXISTS gateway_name(one INTEGER PRIMARY KEY, name TEXT NOT NULL)")
    connection.execute("INSERT OR IGNORE INTO gateway_name VALUES (1, ?)", (f"gateway-{secrets.token_hex(8)}",))
    [name] = connection.execute("SELECT name FROM gateway_name").fetchone()
    return str(name)


def _count(connection: sqlite3.Connection, name: str) -> None:
    """Migrates layout 0, which lacks tables alone. Its trigger does less than today's, and is made anew with them."""
    for table, columns in _UNCOUNTED.items():
        found = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if found and found != columns:
            raise Conflict(
                f"{name} was written by a gateway too old to read: its table {table} has {', '.join(sorted(found))}",
                hint="let the trainer read its trajectories through the gateway that wrote it, "
                "or give another --data directory",
            )
    connection.execute("DROP TRIGGER IF EXISTS finished")


def _add_column(connection: sqlite3.Connection, column: str) -> None:
    """Adds it to `turns`, null in older rows: ends without a number are ordered by their time (before 4), and a prompt
    that inherits nothing is whole (before 5)."""
    found = {row[1] for row in connection.execute("PRAGMA table_info(turns)")}
    if found and column not in found:
        connection.execute(f"ALTER TABLE turns ADD COLUMN {column} INTEGER")


def _pack_trajectories(connection: sqlite3.Connection) -> None:
    """Moves trajectories of before 6 (msgpack, in one table) to the tables of today. A body that does not decode moves
    as it is, without facts: whoever loads it names it, and leaves it out."""
    columns = {row[1] for row in connection.execute("PRAGMA table_info(trajectories)")}
    if "body" in columns:
        connection.execute("ALTER TABLE trajectories RENAME TO trajectories_5")
        connection.execute("DROP TRIGGER IF EXISTS finished")  # it would end sessions again; it is made anew with them
        for statement in TRAJECTORIES.split(";"):
            connection.execute(statement)
        for row in connection.execute(
            "SELECT seq, session_id, group_id, oldest_version, lease_id, body FROM trajectories_5 ORDER BY seq"
        ):
            _move(connection, *row)
        connection.execute("DROP TABLE trajectories_5")
    found = {row[1] for row in connection.execute("PRAGMA table_info(leases)")}
    if found and "uses_max" not in found:
        connection.execute("ALTER TABLE leases ADD COLUMN uses_max INTEGER NOT NULL DEFAULT 1")


def _move(
    connection: sqlite3.Connection,
    seq: int,
    session_id: str,
    group_id: str,
    oldest_version: int,
    lease_id: str | None,
    body: bytes,
) -> None:
    facts = b""
    with leaving_out("trajectories", seq):
        leaves = decode_msgpack(body, list[Trajectory])
        body = packed.pack(leaves)
        facts = msgspec.msgpack.encode(packed.facts_of(leaves, len(body)))
    connection.execute(
        "INSERT INTO trajectories(seq, session_id, group_id, oldest_version, facts, lease_id) VALUES (?,?,?,?,?,?)",
        (seq, session_id, group_id, oldest_version, facts, lease_id),
    )
    connection.execute("INSERT INTO trajectory_bodies VALUES (?,?)", (seq, body))
