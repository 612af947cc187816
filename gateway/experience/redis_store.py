"""The store of experience in a Redis that several gateways share.

The decisions stay where they are (`gateway.core.selection`, `leases`): each gateway has a replica of the bookkeeping,
decides on it, and claims what it chose by a script, which refuses what another gateway took meanwhile (`Raced`). Then
the gateway catches up, and decides again. The script is `redis_store.lua`; it names the keys.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Literal

import msgspec

from gateway.core.selection import Entry
from gateway.experience import replica, rows
from gateway.experience.leases import BufferState, LeaseState
from gateway.experience.outbox import Finish, Outbox, Sending
from gateway.experience.stores import Change, Kept, Raced
from gateway.redis import RedisServer, Script
from gateway.redis.server import WAIT_S
from gateway.runtime.clock import unix_s
from gateway.store.database import Database, Operation
from protos.errors import Conflict, NotFound, Unavailable
from protos.packed import Facts

log = logging.getLogger(__name__)

SCRIPT = Script((files("gateway.experience") / "redis_store.lua").read_text())
ROOM = "experience"
EVENTS_MAX = 1000
"""Events of one reply."""
PAGE_MAX = 500
"""Entries of one reply, about: some milliseconds of the Redis."""
_FIELDS = ("seq", "session", "group", "oldest", "facts", "uses", "lease")
DOUBTFUL_MAX = 1024
"""Leases that may be there although no reader has them; beyond, they end by their own time."""
REVISIONS_MAX = 100
"""Attempts to replace a body that others replace at the same time."""

Landed = Literal["ok", "known", "taken", "full", "raced"]
"""`known`: it landed before. `taken`: another finish has the session's name. `full`: without room, nothing was
added. `raced`: what was to make room is not free."""


class RedisStore:
    """`database`: the gateway's own, which has the ends of sessions, and what is not sent yet."""

    def __init__(self, database: Database, server: RedisServer, capacity: int, bytes_max: int) -> None:
        self._database, self._server = database, server
        self._capacity, self._bytes_max = capacity, bytes_max
        self._revision = -1  # of the replica; -1: there is none
        self._connected = 0  # at which connection the replica was made
        self._raced = False
        self._doubtful: list[str] = []
        self.outbox = Outbox(database)
        self.unsent: list[Sending] = []  # what an earlier life of this gateway left; whoever opened the store sends it
        self.lapsed = 0  # leases that this gateway's calls found over

    async def open(self) -> Kept:
        """Makes the tables, too. `Kept` is of the shared store: it may change at any time (`catch_up`)."""
        if left := await self._database.run(rows.count):
            log.warning("%d sessions' trajectories stay in the database: no reader of the Redis gets them", left)
        self.unsent = await self.outbox.open()
        unsent = [_finish(sending) for sending in self.unsent if sending.kind == "finish"]
        await self._call("confirm_others", msgspec.json.encode(unsent))
        found = await self._snapshot()
        entries = [(entry, lease or None) for entry, lease in sorted(found.entries, key=lambda row: row[0].seq)]
        leases = [(name, reader, math.inf, uses_max) for name, reader, uses_max in found.leases]
        return Kept(entries, leases, found.closed_groups, max((entry.seq for entry, _ in entries), default=0))

    def check(self) -> None:
        self._server.check()

    async def synced(self) -> None:
        """Nothing to wait for: Redis answers after its own sync (`appendfsync always`)."""

    # -- the replica

    async def catch_up(self, state: BufferState, wait_s: float = WAIT_S) -> bool:
        """Applies to `state` what happened since. Returns whether anything did."""
        await self._give_back_doubtful(wait_s)
        before, raced, anew = self._revision, self._raced, False
        while True:
            newest, events = await self._call("follow", self._revision, EVENTS_MAX, wait_s=wait_s)
            unexplained = raced and newest == before  # a race without an event: the replica is wrong
            if events is None or unexplained or self._connected != self._server.connected or self._revision < 0:
                self._connected = self._server.connected
                found = await self._snapshot(wait_s)
                replica.restore(state, found)
                self._revision, raced, anew = found.revision, False, True
                continue
            for name, fields in events:
                self._apply(state, fields)
                self._revision = int(name.partition(b"-")[0])
            if self._revision >= newest:
                break
        self._raced = False
        return anew or self._revision != before

    def _apply(self, state: BufferState, fields: Any) -> None:
        event = {name.decode(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}
        if event.get("why") == b"lapsed" and event["by"].decode() == self.outbox.gateway:
            self.lapsed += 1
        replica.apply(state, event)

    async def _snapshot(self, wait_s: float = WAIT_S) -> replica.Snapshot:
        """In pages, so that no call holds the Redis for long. Its revision is that of the first reply: the events above
        it, which say what is, correct what changed meanwhile."""
        revision, leases, closed = await self._call("leases", wait_s=wait_s)
        found: dict[int, tuple[Entry, str]] = {}
        cursor = b"0"
        while True:
            _, cursor, page = await self._call("page", cursor, PAGE_MAX, wait_s=wait_s)
            for row in page:
                fields = dict(zip(_FIELDS, row, strict=True))
                if (entry := replica.entry_of(fields)) is not None:
                    found[entry.seq] = (entry, fields["lease"].decode())
            if cursor == b"0":
                break
        return replica.Snapshot(
            revision,
            list(found.values()),
            [(name.decode(), reader.decode(), int(uses_max)) for name, reader, uses_max in leases],
            [(group.decode(), int(members)) for group, members in zip(closed[::2], closed[1::2], strict=True)],
        )

    # -- what this gateway sends

    async def keep(self, entry: Entry, body: bytes, along: Operation[object] | None) -> Sending:
        """Commits the finish here; `land` sends it. Raises LaminarError without any effect."""
        content = Finish(entry.group_id, entry.oldest_version, msgspec.msgpack.encode(entry.facts), body)
        return await self.outbox.put("finish", entry.session_id, content, along)

    async def land(self, sending: Sending, gone: Sequence[Entry] = (), wait_s: float = WAIT_S) -> Landed:
        """Sends a finish in place of `gone`: one script, for body, index and group."""
        content = sending.content
        assert isinstance(content, Finish)
        reply = await self._call(
            "add",
            _finish(sending),
            sending.name,
            content.group_id,
            content.oldest_version,
            content.facts,
            content.row,
            self._capacity,
            self._bytes_max,
            _seqs(gone),
            wait_s=wait_s,
        )
        landed: Landed = reply[0].decode()
        self._raced = self._raced or landed == "raced"
        return landed

    async def sent(self, sent: Sequence[Sending]) -> None:
        """They landed: nobody sends them again."""
        await self.outbox.delete(sent)
        finishes = [_finish(sending) for sending in sent if sending.kind == "finish"]
        if finishes:
            await self._call("confirm", msgspec.json.encode(finishes))

    # -- ExperienceStore

    async def add(self, entry: Entry, body: bytes, gone: Sequence[Entry], along: Operation[object] | None) -> None:
        """The entry's number is the store's to give. Raises Raced, Conflict or Unavailable although `along` is
        committed: then the outbox has the finish."""
        sending = await self.keep(entry, body, along)
        landed = await self.land(sending, gone)
        if landed == "taken":
            raise taken(entry.session_id)
        if landed not in ("ok", "known"):
            raise Raced(f"session {entry.session_id} found no room")
        await self.sent([sending])

    async def revise(self, entry: Entry, change: Change) -> Facts:
        for _ in range(REVISIONS_MAX):
            body, edits, lease = await self._read(entry)
            if lease:
                raise Conflict(f"a reader has session {entry.session_id}", hint="give rewards before it is sampled")
            after, facts = rows.revised(entry.seq, body, change)
            [done] = await self._call("revise", entry.seq, edits, msgspec.msgpack.encode(facts), after)
            if done == b"ok":
                return facts
        raise Unavailable(f"session {entry.session_id} is changed by others all the time", hint="try again")

    async def read(self, entry: Entry) -> bytes:
        body, _, _ = await self._read(entry)
        return body

    async def _read(self, entry: Entry) -> tuple[bytes, bytes, bytes]:
        body, edits, lease = await self._call("read", entry.seq)
        if body is None:
            self._raced = True
            raise NotFound(
                f"session {entry.session_id} is not in the experience buffer", hint="it was used, or dropped"
            )
        return body, edits, lease

    async def delete(self, gone: Sequence[Entry]) -> Sequence[Entry]:
        if not gone:
            return ()
        left = {int(seq) for seq in await self._call("delete", _seqs(gone))}
        return [entry for entry in gone if entry.seq in left]

    async def lease(self, lease: LeaseState) -> Sequence[bytes]:
        """The lease ends by the Redis' clock: from now on it has no end here."""
        lease_ms = max(1, math.ceil((lease.until - unix_s()) * 1000))
        chosen = " ".join(f"{entry.seq}:{entry.uses}" for entry in lease.entries.values())
        try:
            done, *bodies = await self._call("lease", lease.lease_id, lease.reader, lease_ms, lease.uses_max, chosen)
        except Unavailable:
            self.doubt(lease.lease_id)
            raise
        if done != b"ok":
            self._raced = True
            raise Raced("another gateway leased them")
        lease.until = math.inf
        found: Sequence[bytes] = bodies
        return found

    async def _give_back_doubtful(self, wait_s: float) -> None:
        """Leases that nobody has: the reply was lost, or they were given back while the Redis did not answer."""
        while self._doubtful:
            await self._call("release", self._doubtful[-1], wait_s=wait_s)
            self._doubtful.pop()

    async def use_up(self, lease: LeaseState) -> None:
        if await self.acknowledged(lease.lease_id) is None:
            raise NotFound(
                f"no lease {lease.lease_id!r}", hint="it expired and its trajectories went back: sample again"
            )

    async def acknowledged(self, lease_id: str) -> int | None:
        done, *found = await self._call("acknowledge", lease_id)
        return int(found[0]) if done == b"ok" else None

    async def release(self, lease_id: str) -> None:
        try:
            await self._call("release", lease_id)
        except Unavailable:
            self.doubt(lease_id)
            raise

    def doubt(self, lease_id: str) -> None:
        """Nobody has this lease, if it is there: it is given back once the Redis answers."""
        if len(self._doubtful) < DOUBTFUL_MAX and lease_id not in self._doubtful:
            self._doubtful.append(lease_id)

    async def leave_out(self, entry: Entry) -> None:
        await self._call("leave_out", entry.seq)

    async def close_group(self, group_id: str, members: int, forgotten: Sequence[str] = ()) -> None:
        """`forgotten`: the script forgets the oldest beyond one for each place."""
        await self._call("close_group", group_id, members, self._capacity)

    async def _call(self, operation: str, *arguments: str | bytes | int, wait_s: float = WAIT_S) -> Any:
        return await self._server.call(SCRIPT, ROOM, operation, self.outbox.gateway, *arguments, wait_s=wait_s)


def taken(session_id: str) -> Conflict:
    return Conflict(
        f"another gateway has finished a session {session_id}: this one's trajectory is not kept",
        hint="give each session a name of its own over all gateways",
    )


def _finish(sending: Sending) -> str:
    """What names it at the Redis: a later session of the same name is another finish."""
    return f"{sending.number} {sending.name}"


def _seqs(entries: Sequence[Entry]) -> str:
    return " ".join(str(entry.seq) for entry in entries)
