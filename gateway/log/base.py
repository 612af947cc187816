"""The seams of the log: who sends commands (`Commands`), what carries them out (`Machine`), what orders them
(`CommandLog`).

Invariants:
- a machine's state is what the commands of its log made of it, in the log's order and with the log's times: nothing
  else changes it, so all gateways have the same one at the same place;
- a command that is refused (LaminarError) is refused alike everywhere, and has changed nothing;
- a place is proven, not believed: whoever reads on from it shows which entry it stands at, and a log that has another
  one there, or none, says so. Then nothing is appended, and the reader begins anew from the snapshot;
- no reply is larger than some `REPLY_BYTES_MAX`, and what is larger is read in parts: so a deadline is one of silence,
  on a link of any speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.commands import Effect
from protos.errors import LaminarError

PART_BYTES = 64 << 10
"""Of a body, the pieces that it is kept, sent and read in."""
REPLY_BYTES_MAX = 128 << 10
"""Of the commands in one reply; one that is larger alone is a body, and the log has its name."""

Position = tuple[int, int]
"""A place's number in its log: the second one is 0 where the first is enough."""


@dataclass(frozen=True, slots=True)
class Place:
    """An entry of a log. `mark`: who sent it, in which batch, and where in it; no two entries have the same. So it
    tells whether the log that is there now has this entry, or another one that got its number."""

    position: Position
    mark: str


BEGIN = Place((0, 0), "")


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes that commands name and do not have in them. `num_parts`: of `PART_BYTES` each, but for the last."""

    name: str
    num_parts: int


def parts_in(num_bytes: int) -> int:
    return max(1, -(-num_bytes // PART_BYTES))


def parts_of(content: bytes) -> list[bytes]:
    return [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)] or [b""]


@dataclass(frozen=True, slots=True)
class Batch:
    """It is in the log once, however often it is sent: of one `life`, a batch whose number is not above the newest
    one's is not appended. `along`: bodies that are put first, in the same round trip: few bytes. `needs`: bodies that
    have to be there then, or nothing is appended."""

    life: str
    number: int
    commands: Sequence[bytes] = ()
    needs: Sequence[Body] = ()
    along: Sequence[tuple[Body, bytes]] = ()


@dataclass(frozen=True, slots=True)
class Logged:
    """An entry. `life`, `number` and `at` name it. `unix_s`: when it was appended, by the store's clock, which never
    goes back from one entry to the next."""

    position: Position
    unix_s: float
    life: str
    number: int
    at: int
    command: bytes

    @property
    def place(self) -> Place:
        return Place(self.position, f"{self.life}-{self.number}-{self.at}")


@dataclass(frozen=True, slots=True)
class Exchanged:
    """`proven`: the log has the place that was read on from; if not, nothing was appended or read. `last`: the newest
    entry. `since`: entries since the snapshot. `unix_s`: now, by the store's clock."""

    proven: bool
    last: Position
    since: int
    unix_s: float
    logged: Sequence[Logged] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What all commands up to `place` made. `body` None: there is none yet. `kept_since_unix_s`: the log has all
    entries from then on."""

    place: Place = BEGIN
    body: Body | None = None
    kept_since_unix_s: float = 0.0


class CommandLog(Protocol):
    """One order of commands, and the bodies that they name, in a store that gateways share. Each method is repeated
    while the store is away, for `wait_s` at most, and then raises Unavailable: what it was for may have landed."""

    async def exchange(self, place: Place, batch: Batch, *, wait_s: float) -> Exchanged:
        """Appends the batch, if any, and reads some of what stands behind `place`. Raises NotFound where a body that it
        needs is not there, or not whole; then nothing was appended."""
        ...

    async def put(self, body: Body, content: bytes, *, wait_s: float) -> None: ...

    async def read(self, bodies: Sequence[Body], *, wait_s: float) -> list[bytes | None]:
        """None for one that is not there, or not whole."""
        ...

    async def drop(self, names: Sequence[str]) -> None: ...

    async def names(self) -> list[str]:
        """Of all bodies."""
        ...

    async def snapshot(self) -> Snapshot: ...

    async def keep(self, place: Place, body: Body) -> None:
        """The body is the snapshot, unless there is a newer one. Entries up to the snapshot before are forgotten."""
        ...


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """`failure`: why calls do not get through now; `failed`: attempts that did not; `connected`: how often the store
    was checked, which is at the start and after each loss. `unchecked`: settings that it does not show."""

    address: str
    namespace: str
    failure: str
    failed: int
    connected: int
    unchecked: list[str]


class SharedStore(Protocol):
    """A store that gateways share, connected. `failure`: why it takes nothing now; empty while it does."""

    @property
    def failure(self) -> str: ...

    @property
    def address(self) -> object: ...

    def check(self) -> None:
        """Raises Unavailable while it takes nothing."""
        ...

    def log(self, room: str) -> CommandLog:
        """`room`: whose commands."""
        ...

    def statistics(self) -> StoreStatistics: ...

    async def close(self) -> None: ...


Outcome = Effect | LaminarError


@dataclass(frozen=True, slots=True)
class Timed:
    """A command, and when it is carried out (Unix time in seconds)."""

    command: Any
    unix_s: float


class Machine(Protocol):
    """What commands change. They are msgpack structs of one tagged union; one that names a body does so in its field
    `body`."""

    def decode(self, command: bytes) -> Any: ...

    async def apply(self, commands: Sequence[Timed]) -> Sequence[Outcome]:
        """Each whole or not at all, in order."""
        ...

    async def resume(self, now: float) -> None:
        """Takes over what an earlier life left, where the state is this gateway's alone."""
        ...

    async def dump(self) -> Sequence[bytes]: ...

    async def restore(self, dumped: Sequence[bytes]) -> None:
        """Replaces everything; with nothing, if nothing was dumped."""
        ...

    def undo(self, command: Any) -> Any | None:
        """What ends the lease that the command may have begun, although nobody got the answer. None: nothing has to."""
        ...

    def keeps(self, body: str) -> bool:
        """Whether the state names this body."""
        ...


@dataclass(frozen=True, slots=True)
class Hooks:
    """`applied`: after each command, with whether this gateway sent it. `restored`: the state was replaced."""

    applied: Callable[[Any, Outcome, bool], None]
    restored: Callable[[], None]


class Commands(Protocol):
    """How one owner changes its state."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def now(self) -> float:
        """Unix time in seconds, by the clock that commands are timed with."""
        ...

    def check(self) -> None:
        """Raises Unavailable while nothing can be changed."""
        ...

    async def synced(self) -> None:
        """When this returns, what was answered survives a power cut."""
        ...

    async def look(self) -> None:
        """When this returns, what others had changed before is here."""
        ...

    async def run(self, command: Any) -> Any:
        """The command's answer. Raises what it was refused with, and Unavailable: then it had no effect, or its lease
        is ended."""
        ...


Ordering = Callable[[Machine, Hooks], Commands]
"""Which order commands get: a gateway's own, or that of a log which it shares."""
