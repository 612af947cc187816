"""What a table is exported from: the file of a gateway's database, or a running gateway.

The file serves a gateway that is stopped, and one that runs: it is opened for reading alone, in pages, so that no lock
and no snapshot outlasts one of them. A gateway serves whatever store it has, through its own API, which gives the rows
as they are stored, under no lease. So a trainer never waits for an export, and loses nothing to it; what it uses up
meanwhile may be missing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from gateway.experience import rows
from gateway.store.database import DATABASE_NAME
from gateway.store.layout import LAYOUT
from gateway.tables.schema import KeptFor, Stored
from protos.errors import Conflict, NotFound, Unavailable
from protos.packed import Offer

PAGE = 256
"""Sessions whose facts are read at once; bodies are read one by one."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sessions. `version_min`, `version_max`: all its sampled tokens are of versions within. `since`, `until`:
    when it finished, in Unix time. `after`: its number is higher. `unread`: no reader has it, or acknowledged it."""

    version_min: int | None = None
    version_max: int | None = None
    since: float | None = None
    until: float | None = None
    after: int = 0
    unread: bool = False
    limit: int | None = None

    def has(self, offer: Offer) -> bool:
        versions, finished = offer.facts.versions, offer.facts.finished_unix_s
        return (
            (self.version_min is None or min(versions, default=-1) >= self.version_min)
            and (self.version_max is None or max(versions, default=self.version_max + 1) <= self.version_max)
            and (self.since is None or finished >= self.since)
            and (self.until is None or finished < self.until)
            and not (self.unread and (offer.leased or offer.uses))
        )


class Source(Protocol):
    """`kept_for`: what the ids belong to. `num_damaged`: sessions that were left out, as the log says."""

    num_damaged: int

    @property
    def kept_for(self) -> KeptFor: ...

    def count(self, after: int) -> int:
        """Sessions with higher numbers, for the progress."""
        ...

    def offers(self, after: int) -> Iterator[Offer]:
        """The sessions with higher numbers, in the order of finishes."""
        ...

    def read(self, offer: Offer) -> Stored | None:
        """None: it was used up meanwhile."""
        ...


class DatabaseFile:
    """The file `gateway.sqlite` of a `--data` directory; its gateway may run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_damaged = 0
        self._connection: sqlite3.Connection

    def __enter__(self) -> Self:
        if not self._path.exists():
            raise NotFound(f"{self._path} is not there", hint="--store takes a gateway's --data directory, or its URL")
        try:
            self._connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)
            self._check_layout()
            self._ended = dict(rows.load_closed_groups(self._connection))
            [kept] = self._connection.execute("SELECT model, vocabulary FROM kept_for").fetchall() or [("", "")]
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._kept_for = KeptFor(*kept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()

    @property
    def kept_for(self) -> KeptFor:
        return self._kept_for

    def count(self, after: int) -> int:
        [(found,)] = self._fetch("SELECT count(*) FROM trajectories WHERE seq>?", after)
        return int(found)

    def offers(self, after: int) -> Iterator[Offer]:
        while page := self._page(after):
            for _, offer in page:
                if offer is None:
                    self.num_damaged += 1
                else:
                    yield offer
            after = page[-1][0]

    def _page(self, after: int) -> list[tuple[int, Offer | None]]:
        try:
            return rows.page(self._connection, after, PAGE)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def read(self, offer: Offer) -> Stored | None:
        found = self._fetch("SELECT body FROM trajectory_bodies WHERE seq=?", offer.seq)
        return Stored(offer, bytes(found[0][0]), self._ended.get(offer.group_id)) if found else None

    def _check_layout(self) -> None:
        [found] = self._connection.execute("PRAGMA user_version").fetchone()
        if found != LAYOUT:
            advice = "start its gateway once, which brings it up to date" if found < LAYOUT else "take its own release"
            raise Conflict(f"{self._path} has layout {found}, and this release reads {LAYOUT}", hint=advice)

    def _fetch(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: sqlite3.Error) -> Unavailable:
        return Unavailable(f"cannot read {self._path}: {error}", hint="--store takes a gateway's --data directory")


def database_path(store: Path) -> Path:
    """The database of a `--data` directory, or `store` itself if it is one."""
    return store if store.suffix == Path(DATABASE_NAME).suffix else store / DATABASE_NAME
