"""The log of commands in a Redis. The script is `command_log.lua`; it names the keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any, TypeVar

from gateway.core.addresses import RedisAddress
from gateway.log.base import (
    REPLY_BYTES_MAX,
    Batch,
    Body,
    Exchanged,
    Logged,
    Place,
    Position,
    Snapshot,
    parts_of,
)
from gateway.log.redis_server import RedisServer, Script, Words
from protos.errors import NotFound

T = TypeVar("T")

SCRIPT = Script((files("gateway.log") / "command_log.lua").read_text())
READ_AT_ONCE = 64
"""Parts of one round trip: each reply has a deadline of its own."""
PUT_AT_ONCE = 8
"""Parts that are sent at once, with one deadline."""
NAMES_AT_ONCE = 1000


class RedisLog:
    """`room`: what it is the log of, which is a part of its keys' names."""

    def __init__(self, server: RedisServer, room: str) -> None:
        self._server, self._room = server, room
        self._prefix = server.prefix(room)

    async def exchange(self, place: Place, batch: Batch, *, wait_s: float) -> Exchanged:
        needs = [word for body in batch.needs for word in (body.name, body.num_parts)]
        words = (*needs, *batch.commands)
        where = _text(place.position), place.mark, REPLY_BYTES_MAX
        before = [words for body, content in batch.along for words in self._puts(body, content)]
        found = await self._call(
            "exchange",
            *where,
            batch.life,
            batch.number,
            len(needs),
            *words,
            wait_s=wait_s,
            confirm=bool(words),
            before=before,
        )
        if len(found) == 1:
            raise NotFound(f"body {found[0].decode()!r} is not there, or not whole", hint="put it again")
        proven, last, since, (seconds, micros), entries = found
        logged = [_logged(name, fields) for name, fields in entries]
        return Exchanged(bool(proven), _position(last), since, int(seconds) + int(micros) / 1e6, logged)

    async def put(self, body: Body, content: bytes, *, wait_s: float) -> None:
        for some in _batches(self._puts(body, content), PUT_AT_ONCE):
            await self._server.send(*some, wait_s=wait_s)

    def _puts(self, body: Body, content: bytes) -> list[Words]:
        return [("HSET", self._key(body.name), number, part) for number, part in enumerate(parts_of(content))]

    async def read(self, bodies: Sequence[Body], *, wait_s: float) -> list[bytes | None]:
        wanted = [(body.name, number) for body in bodies for number in range(body.num_parts)]
        parts: dict[str, list[bytes | None]] = {body.name: [] for body in bodies}
        for some in _batches(wanted, READ_AT_ONCE):
            commands: list[Words] = [("HGET", self._key(name), number) for name, number in some]
            for (name, _), part in zip(some, await self._server.send(*commands, wait_s=wait_s), strict=True):
                parts[name].append(part)
        return [_joined(parts[body.name]) for body in bodies]

    async def drop(self, names: Sequence[str]) -> None:
        for some in _batches(list(names), NAMES_AT_ONCE):
            await self._server.send(("UNLINK", *map(self._key, some)))

    async def names(self) -> list[str]:
        found: set[str] = set()
        cursor: bytes | int = b"0"
        beginning = self._key("")
        while True:
            pattern = f"{beginning}*"
            [(cursor, keys)] = await self._server.send(("SCAN", cursor, "MATCH", pattern, "COUNT", NAMES_AT_ONCE))
            found.update(key.decode().removeprefix(beginning) for key in keys)
            if cursor in (b"0", 0):
                return sorted(found)

    async def snapshot(self) -> Snapshot:
        where, mark, name, num_parts, trimmed = await self._call("snapshot")
        body = Body(name.decode(), num_parts) if name else None
        return Snapshot(Place(_position(where), mark.decode()), body, _position(trimmed)[0] / 1000)

    async def keep(self, place: Place, body: Body) -> None:
        old = await self._call("keep", _text(place.position), place.mark, body.name, body.num_parts)
        if old:
            await self.drop([old.decode()])

    def _key(self, name: str) -> str:
        return f"{self._prefix}:body:{name}"

    async def _call(self, operation: str, *arguments: str | bytes | int, **options: Any) -> Any:
        return await self._server.call(SCRIPT, self._room, operation, *arguments, **options)


class RedisStore(RedisServer):
    """A Redis as a store of logs. Implements `gateway.log.base.SharedStore`."""

    ADDRESS = RedisAddress

    def log(self, room: str) -> RedisLog:
        return RedisLog(self, room)


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _joined(parts: Iterable[bytes | None]) -> bytes | None:
    found = list(parts)
    return None if None in found else b"".join(part for part in found if part is not None)


def _text(position: Position) -> str:
    return f"{position[0]}-{position[1]}"


def _position(name: bytes) -> Position:
    ms, _, number = name.partition(b"-")
    return int(ms), int(number)


def _logged(name: bytes, fields: Sequence[bytes]) -> Logged:
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    position = _position(name)
    life, number, at = found[b"life"].decode(), int(found[b"number"]), int(found[b"at"])
    return Logged(position, position[0] / 1000, life, number, at, found[b"command"])
