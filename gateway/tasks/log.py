"""The commands of gateways that share a prompt pool, in one order, in their Redis. The script is `task_log.lua`; it
names the keys."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from gateway.redis import RedisServer, Script
from gateway.redis.server import WAIT_S
from protos.errors import Unavailable

SCRIPT = Script((files("gateway.tasks") / "task_log.lua").read_text())
ROOM = "tasks"
ENTRIES_MAX = 64
"""Commands of one reply: each may be as large as a request's body."""
RESTARTS_MAX = 10
"""Attempts to read a snapshot while others replace it."""

Position = tuple[int, int]
"""A place in the log: the milliseconds of the Redis' clock, and a number within them."""
BEGIN: Position = (0, 0)


@dataclass(frozen=True, slots=True)
class Logged:
    """`life`, `number` and `at` name the command: who sent it, in which batch, and where in it."""

    position: Position
    life: str
    number: int
    at: int
    command: bytes

    @property
    def unix_s(self) -> float:
        """When the Redis took it, by its clock, which never goes back here."""
        return self.position[0] / 1000


@dataclass(frozen=True, slots=True)
class Exchanged:
    """`born`: the log's name, empty while it has no command; another one later means that Redis lost all it had.
    `last`: the newest command's place. Commands up to `trimmed` are gone. `since`: commands since the snapshot."""

    born: str
    last: Position
    trimmed: Position
    since: int
    unix_s: float
    logged: Sequence[Logged]


class TaskLog:
    """`life`: this gateway's name in the log, another one after each start."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._number = 0
        self.life = secrets.token_hex(8)

    async def exchange(
        self, position: Position, commands: Sequence[bytes] = (), *, wait_s: float = WAIT_S
    ) -> tuple[int, Exchanged]:
        """Appends the commands, as one batch, and reads what stands behind `position`; with the batch's number.

        Raises Unavailable: then the batch is in the log, or will never be.
        """
        if commands:
            self._number += 1
        born, last, trimmed, since, seconds, micros, found = await self._call(
            "exchange", self.life, self._number, _text(position), ENTRIES_MAX, *commands, wait_s=wait_s
        )
        logged = [_logged(name, fields) for name, fields in found]
        now = int(seconds) + int(micros) / 1e6
        return self._number, Exchanged(born.decode(), _position(last), _position(trimmed), int(since), now, logged)

    async def keep_snapshot(self, position: Position, parts: Sequence[bytes]) -> None:
        """What all commands up to `position` made; older commands are forgotten. Nothing if there is a newer one."""
        for number, part in enumerate(parts):
            await self._call("put_part", _text(position), number, part)
        await self._call("keep_snapshot", _text(position), len(parts))

    async def snapshot(self) -> tuple[Position, list[bytes]]:
        """The newest one, and its place; `BEGIN` and no parts while there is none."""
        for _ in range(RESTARTS_MAX):
            name, num_parts = await self._call("find_snapshot")
            parts = [(await self._call("read_part", name, number))[0] for number in range(int(num_parts))]
            if None not in parts:
                return _position(name), parts
        raise Unavailable("the snapshot of the prompt pool is replaced all the time", hint="try again")

    async def _call(self, operation: str, *arguments: str | bytes | int, wait_s: float = WAIT_S) -> Any:
        return await self._server.call(SCRIPT, ROOM, operation, *arguments, wait_s=wait_s)


def _text(position: Position) -> str:
    return f"{position[0]}-{position[1]}"


def _position(name: bytes) -> Position:
    ms, _, number = name.partition(b"-")
    return int(ms), int(number)


def _logged(name: bytes, fields: Sequence[bytes]) -> Logged:
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    return Logged(_position(name), found[b"life"].decode(), int(found[b"number"]), int(found[b"at"]), found[b"command"])
