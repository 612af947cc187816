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

import httpx
import msgspec

from gateway.experience import rows
from gateway.store.database import DATABASE_NAME
from gateway.store.layout import LAYOUT
from gateway.tables.schema import KeptFor, Stored
from protos.access.bearer import KEY_HINT, bearer
from protos.decoding import decode_json
from protos.engines import is_address
from protos.errors import Conflict, Forbidden, NotFound, Unavailable
from protos.packed import MEDIA_TYPE, Offer, rows_of

PAGE = 256
"""Sessions whose facts are read at once; bodies are read one by one."""
HTTP_TIMEOUT_S = 60.0
ACCEPTED = f"{MEDIA_TYPE}, application/json"


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
        except sqlite3.Error as error:
            raise self._failed(error) from error
        try:
            self._check_layout()
            self._ended = dict(rows.load_closed_groups(self._connection))
            [kept] = self._connection.execute("SELECT model, vocabulary FROM kept_for").fetchall() or [("", "")]
        except BaseException as error:
            self._connection.close()
            if isinstance(error, sqlite3.Error):
                raise self._failed(error) from error
            raise
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


class _Rows(msgspec.Struct):
    """What `GET /experience/rows` answers."""

    rows: list[Offer]
    next_after: int | None
    closed_groups: dict[str, int]
    model: str
    vocabulary: str


class RunningGateway:
    """A gateway at its URL, whatever store it has."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # A cluster-internal address, never a proxy.
        self._http = httpx.Client(timeout=HTTP_TIMEOUT_S, trust_env=False, headers=bearer())
        self._ended: dict[str, int] = {}
        self.num_damaged = 0

    def __enter__(self) -> Self:
        try:
            first = self._page(0, 1)
        except BaseException:
            self._http.close()
            raise
        self._kept_for = KeptFor(first.model, first.vocabulary)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    @property
    def kept_for(self) -> KeptFor:
        return self._kept_for

    def count(self, after: int) -> int:
        return sum(1 for _ in self.offers(after))

    def offers(self, after: int) -> Iterator[Offer]:
        following: int | None = after
        while following is not None:
            page = self._page(following, PAGE)
            self._ended.update(page.closed_groups)
            yield from page.rows
            following = page.next_after

    def read(self, offer: Offer) -> Stored | None:
        found = self._get(f"/experience/rows/{offer.seq}")
        if found.status_code == httpx.codes.NOT_FOUND:
            return None
        try:
            _, [row] = rows_of(self._answered(found).content)
        except ValueError as error:
            raise self._wrong(error) from error
        return Stored(offer, row, self._ended.get(offer.group_id))

    def _page(self, after: int, limit: int) -> _Rows:
        answer = self._answered(self._get("/experience/rows", after=after, limit=limit, leased=1))
        try:
            found: _Rows = decode_json(answer.content, _Rows)
        except msgspec.DecodeError as error:
            raise self._wrong(error) from error
        return found

    def _get(self, path: str, **query: int) -> httpx.Response:
        try:
            return self._http.get(self._url + path, params=query, headers={"Accept": ACCEPTED})
        except httpx.HTTPError as error:
            raise Unavailable(f"no gateway answers at {self._url}: {error}", hint="name one with --store") from error

    def _answered(self, answer: httpx.Response) -> httpx.Response:
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise Forbidden(f"{self._url} answered {answer.status_code}: {answer.text[:300]}", hint=KEY_HINT)
        try:
            return answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise self._wrong(error) from error

    def _wrong(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"what answers at {self._url} is no gateway of this release: {error}", hint="name one with --store"
        )


def source_of(store: str) -> DatabaseFile | RunningGateway:
    """`store`: a gateway's URL, or its `--data` directory."""
    return RunningGateway(store) if is_address(store) else DatabaseFile(database_path(Path(store)))


def database_path(store: Path) -> Path:
    """The database of a `--data` directory, or `store` itself if it is one."""
    return store if store.suffix == Path(DATABASE_NAME).suffix else store / DATABASE_NAME
