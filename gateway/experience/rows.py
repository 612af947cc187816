"""The experience buffer on disk: its tables and the operations on them, which run in the database's thread.

A session's packed trajectories stand apart from its row: what changes often (leases, uses) is small, and a start reads
no bodies.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

import msgspec

from gateway.core.experience import Change, Closed, Gone, Leased, LeaseState, LeftOut, Put, Released, Replaced, Used
from gateway.core.selection import Entry
from gateway.runtime.clock import unix_s
from gateway.store.damage import leaving_out
from gateway.store.layout import TRAJECTORIES
from protos.decoding import decode_msgpack
from protos.packed import Facts, Offer

_SCHEMA = f"""
{TRAJECTORIES};
CREATE TABLE IF NOT EXISTS closed_groups(group_id TEXT PRIMARY KEY, members INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS leases(lease_id TEXT PRIMARY KEY, reader TEXT NOT NULL, until_unix_s REAL NOT NULL,
    uses_max INTEGER NOT NULL DEFAULT 1)
"""


def _make_tables(connection: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)


def count(connection: sqlite3.Connection) -> int:
    """Makes the tables, too."""
    _make_tables(connection)
    [found] = connection.execute("SELECT count(*) FROM trajectories").fetchone()
    return int(found)


def load(
    connection: sqlite3.Connection,
) -> tuple[list[tuple[Entry, str | None]], list[tuple[str, str, float, int]], int]:
    """The entries with their lease's id, the leases, and the number of the last row, also of a damaged one."""
    _make_tables(connection)
    rows = connection.execute(
        "SELECT seq, session_id, group_id, oldest_version, facts, uses, lease_id FROM trajectories ORDER BY seq"
    ).fetchall()
    leases = connection.execute("SELECT lease_id, reader, until_unix_s, uses_max FROM leases").fetchall()
    found: list[tuple[Entry, str | None]] = []
    for seq, session_id, group_id, oldest_version, facts, uses, lease_id in rows:
        with leaving_out("trajectories", seq):
            known = decode_msgpack(facts, Facts)
            entry = Entry(seq, session_id, group_id, _number(oldest_version), known, _number(uses))
            found.append((entry, lease_id))
    return found, leases, max((row[0] for row in rows), default=0)


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is not a number")
    return value


def load_closed_groups(connection: sqlite3.Connection) -> list[tuple[str, int]]:
    return connection.execute("SELECT group_id, members FROM closed_groups").fetchall()


def page(connection: sqlite3.Connection, after: int, limit: int) -> list[tuple[int, Offer | None]]:
    """Up to `limit` rows with numbers above `after`, leased ones included; None for one whose facts do not decode."""
    found = connection.execute(
        "SELECT seq, session_id, group_id, facts, uses, lease_id FROM trajectories WHERE seq>? ORDER BY seq LIMIT ?",
        (after, limit),
    ).fetchall()
    return [(seq, _offer(seq, *row)) for seq, *row in found]


def _offer(seq: int, session_id: str, group_id: str, facts: bytes, uses: int, lease_id: str | None) -> Offer | None:
    with leaving_out("trajectories", seq):
        known = decode_msgpack(facts, Facts)
        leased = lease_id is not None
        return Offer(seq=seq, session_id=session_id, group_id=group_id, uses=uses, leased=leased, facts=known)
    return None


def write(connection: sqlite3.Connection, changes: Sequence[Change], body: bytes | None = None) -> None:
    """`body`: of the entry that is put, or replaced."""
    for change in changes:
        match change:
            case Put(entry):
                _insert(connection, entry, body or b"")
            case Gone(entries):
                _delete(connection, [entry.seq for entry in entries])
            case Replaced(entry):
                facts = msgspec.msgpack.encode(entry.facts)
                connection.execute("UPDATE trajectory_bodies SET body=? WHERE seq=?", (body, entry.seq))
                connection.execute("UPDATE trajectories SET facts=? WHERE seq=?", (facts, entry.seq))
            case Leased():
                _lease(connection, change)
            case Used(lease):
                _use_up(connection, lease)
            case Released(lease):
                connection.execute("UPDATE trajectories SET lease_id=NULL WHERE lease_id=?", (lease.lease_id,))
                connection.execute("DELETE FROM leases WHERE lease_id=?", (lease.lease_id,))
            case LeftOut(_, entry):
                connection.execute("UPDATE trajectories SET lease_id=NULL WHERE seq=?", (entry.seq,))
            case Closed(group_id, members, forgotten):
                connection.execute("INSERT OR REPLACE INTO closed_groups VALUES (?,?)", (group_id, members))
                names = [(name,) for name in forgotten]
                connection.executemany("DELETE FROM closed_groups WHERE group_id=?", names)


def _insert(connection: sqlite3.Connection, entry: Entry, body: bytes) -> None:
    facts = msgspec.msgpack.encode(entry.facts)
    connection.execute(
        "INSERT INTO trajectories(seq, session_id, group_id, oldest_version, facts) VALUES (?,?,?,?,?)",
        (entry.seq, entry.session_id, entry.group_id, entry.oldest_version, facts),
    )
    connection.execute("INSERT INTO trajectory_bodies VALUES (?,?)", (entry.seq, body))


def _delete(connection: sqlite3.Connection, seqs: Sequence[int]) -> None:
    rows = [(seq,) for seq in seqs]
    connection.executemany("DELETE FROM trajectories WHERE seq=?", rows)
    connection.executemany("DELETE FROM trajectory_bodies WHERE seq=?", rows)


def _lease(connection: sqlite3.Connection, lease: Leased) -> None:
    connection.execute("DELETE FROM leases WHERE until_unix_s <= ?", (unix_s(),))
    connection.execute(
        "INSERT INTO leases(lease_id, reader, until_unix_s, uses_max) VALUES (?,?,?,?)",
        (lease.lease_id, lease.reader, lease.until, lease.uses_max),
    )
    named = [(lease.lease_id, entry.seq) for entry in lease.entries]
    connection.executemany("UPDATE trajectories SET lease_id=? WHERE seq=?", named)


def _use_up(connection: sqlite3.Connection, lease: LeaseState) -> None:
    again = lease.again()
    kept = {entry.seq for entry in again}
    _delete(connection, [seq for seq in lease.entries if seq not in kept])
    connection.executemany(
        "UPDATE trajectories SET uses=?, lease_id=NULL WHERE seq=?", [(entry.uses, entry.seq) for entry in again]
    )
    connection.execute("DELETE FROM leases WHERE lease_id=?", (lease.lease_id,))


def bodies(connection: sqlite3.Connection, seqs: Sequence[int]) -> list[bytes]:
    """In their order; an empty one for a row that lacks it: damaged, as one that does not decode is."""
    read = "SELECT seq, body FROM trajectory_bodies WHERE seq IN (SELECT value FROM json_each(?))"
    found = dict(connection.execute(read, (json.dumps(seqs),)))
    return [body if isinstance(body := found.get(seq), bytes) else b"" for seq in seqs]
