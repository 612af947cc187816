"""The experience buffer on disk: its tables and the operations on them, which run in the database's thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence

import msgspec

from gateway.core.selection import Entry
from gateway.runtime.clock import unix_s
from gateway.store.damage import leaving_out, reading
from protos.decoding import decode_msgpack
from protos.trajectories import Trajectory

_SCHEMA = """
CREATE TABLE IF NOT EXISTS trajectories(
    seq INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL,
    oldest_version INTEGER NOT NULL, body BLOB NOT NULL, lease_id TEXT);
CREATE TABLE IF NOT EXISTS closed_groups(group_id TEXT PRIMARY KEY, members INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS leases(lease_id TEXT PRIMARY KEY, reader TEXT NOT NULL, until_unix_s REAL NOT NULL)
"""


class _Rewarded(msgspec.Struct):
    """The part of a trajectory that decides whether its group teaches anything."""

    reward: float


_decode_rewards = msgspec.msgpack.Decoder(list[_Rewarded]).decode


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
) -> tuple[list[tuple[Entry, str | None]], list[tuple[str, str, float]], int]:
    """The entries with their lease's id, the leases, and the number of the last row, also of a damaged one."""
    _make_tables(connection)
    rows = connection.execute(
        "SELECT seq, session_id, group_id, oldest_version, lease_id FROM trajectories ORDER BY seq"
    ).fetchall()
    leases = connection.execute("SELECT lease_id, reader, until_unix_s FROM leases").fetchall()
    found: list[tuple[Entry, str | None]] = []
    for seq, session_id, group_id, oldest_version, lease_id in rows:
        with leaving_out("trajectories", seq):
            found.append((Entry(seq, session_id, group_id, _number(oldest_version)), lease_id))
    return found, leases, max((row[0] for row in rows), default=0)


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is not a number")
    return value


def load_closed_groups(connection: sqlite3.Connection) -> list[tuple[str, int]]:
    return connection.execute("SELECT group_id, members FROM closed_groups").fetchall()


def close_group(connection: sqlite3.Connection, group_id: str, members: int, gone: Sequence[str]) -> None:
    connection.execute("INSERT OR REPLACE INTO closed_groups VALUES (?,?)", (group_id, members))
    connection.executemany("DELETE FROM closed_groups WHERE group_id=?", [(name,) for name in gone])


def replace(connection: sqlite3.Connection, entry: Entry, body: bytes, gone: Sequence[Entry]) -> None:
    delete(connection, gone)
    row = (entry.seq, entry.session_id, entry.group_id, entry.oldest_version, body)
    connection.execute(
        "INSERT INTO trajectories(seq, session_id, group_id, oldest_version, body) VALUES (?,?,?,?,?)", row
    )


def delete(connection: sqlite3.Connection, entries: Sequence[Entry]) -> None:
    connection.executemany("DELETE FROM trajectories WHERE seq=?", [(entry.seq,) for entry in entries])


def revise(connection: sqlite3.Connection, seq: int, change: Callable[[list[Trajectory]], list[Trajectory]]) -> None:
    [body] = connection.execute("SELECT body FROM trajectories WHERE seq=?", (seq,)).fetchone()
    connection.execute("UPDATE trajectories SET body=? WHERE seq=?", (revised(seq, body, change), seq))


def revised(seq: int, body: bytes, change: Callable[[list[Trajectory]], list[Trajectory]]) -> bytes:
    with reading("trajectories", seq):
        before = decode_msgpack(body, list[Trajectory])
    return msgspec.msgpack.encode(change(before))


def lease_rows(
    connection: sqlite3.Connection, lease_id: str, reader: str, until: float, seqs: list[int]
) -> list[bytes]:
    connection.execute("DELETE FROM leases WHERE until_unix_s <= ?", (unix_s(),))
    connection.execute("INSERT INTO leases VALUES (?,?,?)", (lease_id, reader, until))
    connection.executemany("UPDATE trajectories SET lease_id=? WHERE seq=?", [(lease_id, seq) for seq in seqs])
    read = "SELECT body FROM trajectories WHERE seq=?"
    return [connection.execute(read, (seq,)).fetchone()[0] for seq in seqs]


def delete_lease(connection: sqlite3.Connection, lease_id: str) -> None:
    connection.execute("DELETE FROM trajectories WHERE lease_id=?", (lease_id,))
    connection.execute("DELETE FROM leases WHERE lease_id=?", (lease_id,))


def release(connection: sqlite3.Connection, lease_id: str) -> None:
    connection.execute("UPDATE trajectories SET lease_id=NULL WHERE lease_id=?", (lease_id,))
    connection.execute("DELETE FROM leases WHERE lease_id=?", (lease_id,))


def unlease(connection: sqlite3.Connection, seq: int) -> None:
    connection.execute("UPDATE trajectories SET lease_id=NULL WHERE seq=?", (seq,))


def of_equal_rewards(connection: sqlite3.Connection, entries: Sequence[Entry]) -> list[Entry]:
    read = "SELECT body FROM trajectories WHERE seq=?"
    return equally_rewarded((entry, connection.execute(read, (entry.seq,)).fetchone()[0]) for entry in entries)


def equally_rewarded(bodies: Iterable[tuple[Entry, bytes]]) -> list[Entry]:
    """The members of groups whose rewards are all equal: no member is better than another, so a trainer learns nothing
    from them. Late rewards count: the bodies have them."""
    rewards: dict[str, set[float]] = {}
    entries: list[Entry] = []
    for entry, body in bodies:
        with leaving_out("trajectories", entry.seq):
            rewards.setdefault(entry.group_id, set()).update(leaf.reward for leaf in _decode_rewards(body))
            entries.append(entry)
    return [entry for entry in entries if len(rewards.get(entry.group_id, ())) == 1]
