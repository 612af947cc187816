"""A copy of a gateway's database as of one instant, made while the gateway runs or while it does not.

Invariants:
- the copy is one commit's state: it is read in a single transaction, which delays no writer;
- it has its name only once it is whole, checked and on disk; a copy that failed leaves nothing;
- the directory of a copy is a `--data` directory, so that nothing has to be converted to go on from it.

A copy of the file by other means (`cp`, a snapshot of the file alone) lacks what stands in the write-ahead log, or is
torn between the two.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.store.database import DATABASE_NAME
from gateway.store.sync import sync_folder
from protos.errors import Conflict, Corrupt, NotFound, Unavailable

COUNTED = ("sessions", "trajectories")
"""Tables whose rows a backup counts: live sessions, and finished ones that wait for a trainer."""


@dataclass(frozen=True, slots=True)
class Backup:
    """What a copy holds. A store that keeps its trajectories elsewhere (memory, a shared one) has none of them here."""

    path: Path
    size_bytes: int
    sessions: int
    trajectories: int

    def described(self) -> str:
        return (
            f"{self.path}: {self.size_bytes} bytes, {self.sessions} live sessions, "
            f"finished sessions that wait for a trainer: {self.trajectories}"
        )


def back_up(data: Path, out: Path) -> Backup:
    """Copies the database of the `--data` directory `data` into the directory `out`, which is made if it is not there.

    Raises NotFound without a database in `data`, Conflict when `out` has one already, Unavailable when one of them
    cannot be read or written, and Corrupt when the copy does not pass SQLite's own check.
    """
    source, path = data / DATABASE_NAME, out / DATABASE_NAME
    if not source.exists():
        raise NotFound(f"{source} is not there", hint="--data names the directory that `gateway serve` has")
    if path.exists():
        raise Conflict(f"{path} is there already", hint="give each backup a directory of its own")
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = path.with_name(f".{DATABASE_NAME}.{os.getpid()}")
        scratch.touch(mode=0o600)  # it has the sessions' API keys
        try:
            found = _copy(source, scratch)
            _sync(scratch)
            scratch.rename(path)
        finally:
            scratch.unlink(missing_ok=True)
        sync_folder(out)
    except (OSError, sqlite3.Error) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise Unavailable(f"cannot copy {source} to {path}: {why}", hint="check rights and free space") from e
    return Backup(path, path.stat().st_size, *found)


def _copy(source: Path, scratch: Path) -> list[int]:
    """Returns how many rows the copy has in each table that is counted."""
    with (
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as running,
        closing(sqlite3.connect(scratch)) as copy,
    ):
        running.backup(copy)  # in one step: in several, each commit of the gateway would start it anew
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, complete without a log beside it
        [found] = copy.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise Corrupt(
                f"the copy of {source} is damaged, as the file itself is: {found}",
                hint="keep the last good backup, and export what can be read (`gateway export`)",
            )
        return [_count(copy, table) for table in COUNTED]


def _count(connection: sqlite3.Connection, table: str) -> int:
    """0 without the table: a gateway that keeps its trajectories elsewhere has none."""
    with suppress(sqlite3.OperationalError):
        [found] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 - a name of this module
        return int(found)
    return 0


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
