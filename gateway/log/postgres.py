"""The log of commands in a PostgreSQL.

Invariants:
- appends to one room are one after the other: each holds the room's row until its commit is synced, and confirmed by
  the standbys that `synchronous_standby_names` lists. So positions have no gaps, and who reads one has all before it;
- a batch that comes again writes, too: its commit returns once all that was written before is confirmed;
- bodies are not waited for: the commit of the command that names one is behind it in the same write-ahead log.

The package `asyncpg` is imported only when a gateway connects: it is an optional extra.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gateway.core.addresses import PostgresAddress
from gateway.log.attempts import LAYOUT, WAIT_S, Attempts, Namespace
from gateway.log.base import BEGIN, REPLY_BYTES_MAX, Batch, Body, Exchanged, Logged, Place, Snapshot, parts_of
from protos.errors import InvalidRequest, NotFound
from protos.extras import install

if TYPE_CHECKING:
    import asyncpg

T = TypeVar("T")

REPLY_TIMEOUT_S = 5.0
"""For one reply, which is bounded in bytes; a server that is silent for longer is treated as one that went away."""
CONNECTIONS_MAX = 8
CLOSE_S = 5.0
PARTS_AT_ONCE = 8
"""Of bodies, in one round trip."""
ENTRIES_MAX = 512
"""Of one reply."""

_PASSING = ("08", "28", "3D", "40", "53", "55", "57", "58")
"""Classes of SQLSTATE that speak of the server's state, not of the statement: the same call may succeed later."""
_READ_ONLY = "25006"
_KEEPS = {
    "fsync": "otherwise a power cut loses what was acknowledged last",
    "full_page_writes": "otherwise a power cut may damage what it keeps",
}
"""Settings that have to be on, each with the reason."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS laminar_namespaces(
    namespace text PRIMARY KEY, layout text NOT NULL, model text NOT NULL, vocabulary text NOT NULL,
    epoch text NOT NULL);
CREATE TABLE IF NOT EXISTS laminar_rooms(
    namespace text NOT NULL, room text NOT NULL, last bigint NOT NULL DEFAULT 0,
    last_unix_s double precision NOT NULL DEFAULT 0, snapshot bigint NOT NULL DEFAULT 0, body text NOT NULL DEFAULT '',
    parts integer NOT NULL DEFAULT 0, trimmed bigint NOT NULL DEFAULT 0, PRIMARY KEY(namespace, room));
CREATE TABLE IF NOT EXISTS laminar_log(
    namespace text NOT NULL, room text NOT NULL, position bigint NOT NULL, unix_s double precision NOT NULL,
    life text NOT NULL, number bigint NOT NULL, at integer NOT NULL, command bytea NOT NULL,
    PRIMARY KEY(namespace, room, position));
CREATE TABLE IF NOT EXISTS laminar_bodies(
    namespace text NOT NULL, room text NOT NULL, name text NOT NULL, part integer NOT NULL, content bytea NOT NULL,
    PRIMARY KEY(namespace, room, name, part));
CREATE TABLE IF NOT EXISTS laminar_sent(
    namespace text NOT NULL, room text NOT NULL, life text NOT NULL, number bigint NOT NULL,
    unix_s double precision NOT NULL, PRIMARY KEY(namespace, room, life));
"""
_SCHEMA_LOCK = 0x6C616D696E6172
SENT_S = 86_400.0
"""How long the number of a life's newest batch is kept."""

_NOW = "extract(epoch FROM clock_timestamp())::float8"
_PUT = """
INSERT INTO laminar_bodies VALUES ($1,$2,$3,$4,$5)
ON CONFLICT (namespace, room, name, part) DO UPDATE SET content=excluded.content
"""
_ENTRIES = """
SELECT position, unix_s, life, number, at, command FROM (
    SELECT *, sum(length(command)) OVER (ORDER BY position) AS bytes FROM (
        SELECT * FROM laminar_log WHERE namespace=$1 AND room=$2 AND position>$3 ORDER BY position LIMIT $4) page
) summed WHERE bytes<=$5 OR bytes=length(command) ORDER BY position
"""


class PostgresLog:
    """`room`: what it is the log of."""

    def __init__(self, store: PostgresStore, room: str) -> None:
        self._store, self._key = store, (store.namespace.name, room)

    async def exchange(self, place: Place, batch: Batch, *, wait_s: float) -> Exchanged:
        return await self._run(lambda connection: self._exchange(connection, place, batch), wait_s)

    async def _exchange(self, connection: Any, place: Place, batch: Batch) -> Exchanged:
        writes = bool(batch.commands)
        async with connection.transaction(**({} if writes else {"isolation": "repeatable_read", "readonly": True})):
            last, last_unix_s, snapshot, trimmed, now = await self._room(connection, writes=writes)
            proven = trimmed == 0 if place == BEGIN else await self._mark(connection, place.position[0]) == place.mark
            found: list[Logged] = []
            if proven and writes:
                last = await self._append(connection, batch, last, max(now, last_unix_s))
            if proven:
                rows = await connection.fetch(_ENTRIES, *self._key, place.position[0], ENTRIES_MAX, REPLY_BYTES_MAX)
                found = [Logged((row[0], 0), *list(row)[1:]) for row in rows]
        return Exchanged(proven, (last, 0), last - snapshot, now, found)

    async def _room(self, connection: Any, *, writes: bool) -> Any:
        read = f"SELECT last, last_unix_s, snapshot, trimmed, {_NOW} FROM laminar_rooms WHERE namespace=$1 AND room=$2"  # noqa: S608
        if not writes:
            return await connection.fetchrow(read, *self._key) or (
                0,
                0.0,
                0,
                0,
                await connection.fetchval(f"SELECT {_NOW}"),
            )
        make = "INSERT INTO laminar_rooms(namespace, room) VALUES ($1, $2) ON CONFLICT DO NOTHING"
        await connection.execute(make, *self._key)
        return await connection.fetchrow(f"{read} FOR UPDATE", *self._key)

    async def _mark(self, connection: Any, position: int) -> str | None:
        read = "SELECT life, number, at FROM laminar_log WHERE namespace=$1 AND room=$2 AND position=$3"
        found = await connection.fetchrow(read, *self._key, position)
        return None if found is None else "-".join(map(str, found))

    async def _append(self, connection: Any, batch: Batch, last: int, now: float) -> int:
        read = "SELECT number FROM laminar_sent WHERE namespace=$1 AND room=$2 AND life=$3"
        before = await connection.fetchval(read, *self._key, batch.life) or 0
        if before < batch.number:
            if batch.along:
                await connection.executemany(_PUT, [row for body in batch.along for row in self._rows(*body)])
            await self._refuse_missing(connection, batch.needs)
            rows = [
                (*self._key, last + number, now, batch.life, batch.number, number - 1, command)
                for number, command in enumerate(batch.commands, 1)
            ]
            await connection.executemany("INSERT INTO laminar_log VALUES ($1,$2,$3,$4,$5,$6,$7,$8)", rows)
            last += len(rows)
            change = "UPDATE laminar_rooms SET last=$3, last_unix_s=$4 WHERE namespace=$1 AND room=$2"
            await connection.execute(change, *self._key, last, now)
        await connection.execute(
            "INSERT INTO laminar_sent VALUES ($1,$2,$3,$4,$5) ON CONFLICT (namespace, room, life) "
            "DO UPDATE SET number=greatest(laminar_sent.number, excluded.number), unix_s=excluded.unix_s",
            *(*self._key, batch.life, batch.number, now),
        )
        return last

    async def _refuse_missing(self, connection: Any, needs: Sequence[Body]) -> None:
        read = "SELECT name, count(*) FROM laminar_bodies WHERE namespace=$1 AND room=$2 AND name=ANY($3) GROUP BY name"
        found = (
            dict(map(tuple, await connection.fetch(read, *self._key, [body.name for body in needs]))) if needs else {}
        )
        for body in needs:
            if found.get(body.name) != body.num_parts:
                raise NotFound(f"body {body.name!r} is not there, or not whole", hint="put it again")

    async def put(self, body: Body, content: bytes, *, wait_s: float) -> None:
        rows = self._rows(body, content)

        async def run(connection: Any, some: Sequence[Any]) -> None:
            async with connection.transaction():
                await connection.execute("SET LOCAL synchronous_commit = off")
                await connection.executemany(_PUT, some)

        for at in range(0, len(rows), PARTS_AT_ONCE):
            some = rows[at : at + PARTS_AT_ONCE]
            await self._run(lambda connection, some=some: run(connection, some), wait_s)  # type: ignore[misc]

    def _rows(self, body: Body, content: bytes) -> list[tuple[str, str, str, int, bytes]]:
        return [(*self._key, body.name, number, part) for number, part in enumerate(parts_of(content))]

    async def read(self, bodies: Sequence[Body], *, wait_s: float) -> list[bytes | None]:
        wanted = [(body.name, number) for body in bodies for number in range(body.num_parts)]
        found: dict[tuple[str, int], bytes] = {}
        read = (
            "SELECT name, part, content FROM laminar_bodies "
            "JOIN unnest($3::text[], $4::integer[]) AS wanted(name, part) USING (name, part) "
            "WHERE namespace=$1 AND room=$2"
        )
        for at in range(0, len(wanted), PARTS_AT_ONCE):
            names, parts = zip(*wanted[at : at + PARTS_AT_ONCE], strict=True)
            for name, part, content in await self._fetch(read, list(names), list(parts), wait_s=wait_s):
                found[name, part] = content
        pieces = [[found.get((body.name, number)) for number in range(body.num_parts)] for body in bodies]
        return [None if None in some else b"".join(part for part in some if part is not None) for some in pieces]

    async def drop(self, names: Sequence[str]) -> None:
        delete = "DELETE FROM laminar_bodies WHERE namespace=$1 AND room=$2 AND name=ANY($3)"
        await self._fetch(delete, list(names))

    async def names(self) -> list[str]:
        read = "SELECT DISTINCT name FROM laminar_bodies WHERE namespace=$1 AND room=$2 ORDER BY name"
        return [name for (name,) in await self._fetch(read)]

    async def snapshot(self) -> Snapshot:
        async def run(connection: Any) -> Snapshot:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                read = "SELECT snapshot, body, parts, trimmed FROM laminar_rooms WHERE namespace=$1 AND room=$2"
                found = await connection.fetchrow(read, *self._key)
                if found is None or not found[1]:
                    return Snapshot()
                position, name, num_parts, trimmed = found
                mark = await self._mark(connection, position)
                kept = "SELECT unix_s FROM laminar_log WHERE namespace=$1 AND room=$2 AND position=$3"
                since = await connection.fetchval(kept, *self._key, trimmed) or 0.0
                return Snapshot(Place((position, 0), mark or ""), Body(name, num_parts), since)

        return await self._run(run, WAIT_S)

    async def keep(self, place: Place, body: Body) -> None:
        async def run(connection: Any) -> str:
            async with connection.transaction():
                await self._room(connection, writes=True)
                read = "SELECT snapshot, body FROM laminar_rooms WHERE namespace=$1 AND room=$2"
                before, old = await connection.fetchrow(read, *self._key)
                position = place.position[0]
                if position <= before or await self._mark(connection, position) != place.mark:
                    return body.name
                change = (
                    "UPDATE laminar_rooms SET snapshot=$3, body=$4, parts=$5, trimmed=snapshot "
                    "WHERE namespace=$1 AND room=$2"
                )
                await connection.execute(change, *self._key, position, body.name, body.num_parts)
                delete = "DELETE FROM laminar_log WHERE namespace=$1 AND room=$2 AND position<$3"
                await connection.execute(delete, *self._key, before)
                forget = f"DELETE FROM laminar_sent WHERE namespace=$1 AND room=$2 AND unix_s<{_NOW}-$3::float8"  # noqa: S608
                await connection.execute(forget, *self._key, SENT_S)
                return str(old)

        if old := await self._run(run, WAIT_S):
            await self.drop([old])

    async def _fetch(self, statement: str, *words: object, wait_s: float = WAIT_S) -> Any:
        return await self._run(lambda connection: connection.fetch(statement, *self._key, *words), wait_s)

    async def _run(self, work: Callable[[Any], Awaitable[T]], wait_s: float) -> T:
        return await self._store.call(work, wait_s)


class PostgresStore(Attempts):
    """A PostgreSQL as a store of logs. Implements `gateway.log.base.SharedStore`."""

    ADDRESS = PostgresAddress

    def __init__(self, address: PostgresAddress, namespace: Namespace, *, accept_unchecked: bool = False) -> None:
        super().__init__(address, namespace, accept_unchecked=accept_unchecked)
        self._pool: asyncpg.Pool | None = None
        try:
            import asyncpg  # noqa: F401
        except ImportError as e:
            raise InvalidRequest(
                f"{address} needs the Python package `asyncpg`, which is not installed",
                hint=f"install it: {install('postgres')}",
            ) from e

    async def close(self) -> None:
        """Waits a short time for what is on its way: a connection that is cut in the midst of it logs an error."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await pool.close()
        except Exception as e:
            if not self._passes(e):
                raise
            pool.terminate()

    def log(self, room: str) -> PostgresLog:
        return PostgresLog(self, room)

    async def call(self, work: Callable[[Any], Awaitable[T]], wait_s: float) -> T:
        """What `work` returns, which gets a connection, and has to be idempotent."""

        async def run() -> T:
            assert self._pool is not None
            async with self._pool.acquire(timeout=REPLY_TIMEOUT_S) as connection:
                return await work(connection)

        found: T = await self.attempt(run, wait_s)
        return found

    async def _connect(self) -> None:
        import asyncpg

        if self._pool is not None:
            self._pool.terminate()
        hosts, ports = zip(*self.address.hosts, strict=True)
        self._pool = asyncpg.create_pool(
            host=list(hosts),
            port=list(ports),
            user=self.address.user or "laminar",
            password=self.address.password,
            database=self.address.name,
            ssl=self.address.tls,
            timeout=REPLY_TIMEOUT_S,
            command_timeout=REPLY_TIMEOUT_S,
            min_size=0,
            max_size=CONNECTIONS_MAX,
            target_session_attrs="read-write",
            server_settings={"application_name": "laminar-gateway", "synchronous_commit": "on"},
        )
        await self._pool
        async with self._pool.acquire(timeout=REPLY_TIMEOUT_S) as connection:
            for name, why in _KEEPS.items():
                value = await connection.fetchval("SELECT current_setting($1)", name)
                if value != "on":
                    raise InvalidRequest(
                        f"{self.address}: `{name}` is `{value}` and has to be `on`: {why}",
                        hint=f"write `{name} = on` into its postgresql.conf and reload it",
                    )

    async def _claim(self) -> None:
        assert self._pool is not None
        async with self._pool.acquire(timeout=REPLY_TIMEOUT_S) as connection, connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
            await connection.execute(_SCHEMA)
            mine = self.namespace
            row = mine.name, str(LAYOUT), mine.model, mine.vocabulary, secrets.token_hex(8)
            make = "INSERT INTO laminar_namespaces VALUES ($1,$2,$3,$4,$5) ON CONFLICT DO NOTHING"
            await connection.execute(make, *row)
            read = "SELECT layout, model, vocabulary, epoch FROM laminar_namespaces WHERE namespace=$1"
            found = await connection.fetchrow(read, mine.name)
        self._claimed(*found)

    def _passes(self, error: Exception) -> bool:
        import asyncpg

        if isinstance(error, asyncpg.PostgresError):
            state = error.sqlstate or ""
            return state[:2] in _PASSING or state == _READ_ONLY
        # An InternalClientError is of a connection whose command was cut, or of hosts none of which takes writes.
        return isinstance(error, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError)
