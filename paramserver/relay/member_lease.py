"""A relay's membership in the registry: its lease, its name, the store that it belongs to, and its view of it.

Invariants:
- one live holder per name: a second is refused;
- every key that marks a relay as alive, master or holder stands on its lease, and vanishes with it;
- a relay that finds another store id than the one it began with does not register there: revisions of a wiped
  registry start again, and old epochs would look new;
- the view goes forward only: what the watch repeats of a list read meanwhile is skipped, and a list older than the
  newest event of the watch is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

import msgspec

from paramserver.core import view as keys
from paramserver.core.records import Announced, Member, Sealed
from paramserver.core.view import Fact, View
from paramserver.membership.registry import (
    RETRY_S,
    Absent,
    Changed,
    Created,
    Event,
    Put,
    Registry,
    Removed,
    State,
    parts,
)
from paramserver.relay.holdings import Holdings
from protos.decoding import decode_json
from protos.errors import Conflict, Unavailable
from protos.failures import FailureLog

log = logging.getLogger(__name__)

WRITES_TRIED_S = 10.0
"""How often a relay that writes nothing finds out whether it could; each try costs etcd one entry of its log."""


class MemberLease:
    """One relay's membership; owned by its event loop.

    `foreign_store`: the id of another store that is there now in place of this relay's; "": none.
    """

    def __init__(self, registry: Registry, member: Member, *, ttl_s: float) -> None:
        self._registry = registry
        self.member = member
        self._ttl_s = ttl_s
        self.holdings = Holdings(registry, member.name)
        self.view = View()
        self.reachable = True
        self.foreign_store = ""
        self.lease_id = 0
        self.store_guard = Created("", 0)  # a key that only this store has
        self._taken_by = ""  # who has this relay's name, in words
        self._unusable_because = ""
        self._writes_tried_at = -math.inf  # monotonic
        self._store_id = ""
        self._listed = self._seen = 0  # revision of the list in the view; the newest that came by list or by watch
        self._unreadable: set[str] = set()  # keys that were logged
        self._failures = FailureLog(log)
        self._another_store = asyncio.Event()
        self._adopting: frozenset[str] = frozenset()  # the earlier stores of an adoption that is not complete yet

    @property
    def registry(self) -> Registry:
        return self._registry

    @property
    def name_taken(self) -> bool:
        """Whether another process has this relay's name: then this one is no member."""
        return bool(self._taken_by)

    @property
    def trouble(self) -> str:
        """Why this relay is no member of its registry now, or what keeps it from its work there, for people; else
        empty."""
        if self.foreign_store:
            return (
                f"the registry is another store ({self.foreign_store}) than this relay's ({self._store_id}): "
                "it takes nothing new until `paramserver adopt`"
            )
        if self._taken_by:
            return f"{self._taken_by}: this one is no member, and takes and seals nothing; give it another --name"
        if not self.reachable:
            return self._unusable_because
        return "; ".join(f"{model} has no master: {why}" for model, why in self.view.without_master().items())

    # ---- registering and leaving

    async def take(self) -> None:
        """Registers. Waits for an earlier life's lease to run out; Conflict when the name is really in use."""
        await self.check_store()
        await self._take_name()

    async def _take_name(self) -> None:
        deadline = time.monotonic() + 2 * self._ttl_s + 1.0
        while not await self._register():
            if self.lease_id and await self._registry.keep_alive(self.lease_id):  # `keep` registered first
                return
            if time.monotonic() > deadline:
                raise Conflict(
                    f"a relay named {self.member.name!r} is alive already", hint="give each relay its own --name"
                )
            await asyncio.sleep(RETRY_S)

    async def leave(self) -> None:
        """Revokes the lease, so that others need not wait for it to expire."""
        try:
            await self._registry.revoke(self.lease_id)
        except Unavailable as error:
            log.warning("the lease expires by itself: %s", error)

    async def check_store(self, *, adopting: bool = False) -> None:
        """Remembers which store this is. Unavailable when it is another one than before, unless that is adopted.

        The id is a random key, made once by whichever relay comes first: a wiped etcd has the same cluster id, and its
        revisions start again, so that a new epoch could equal an old one. Beside it stands a key named after
        the id, whose creation guards a master's writes: even when the store is replaced between two calls, no
        transaction that was made for the old one holds in the new one.
        """
        proposal = secrets.token_hex(8)
        await self._registry.transact([Absent(keys.STORE)], [Put(keys.STORE, proposal.encode())])
        state = await self._registry.list(keys.STORE)
        if not state.entries:
            raise Unavailable("the registry was emptied between two calls")
        found = state.entries[0].value.decode()
        if self._store_id and found != self._store_id and not adopting:
            self._note_foreign(found)
            raise Unavailable(
                f"the registry is another store ({found}) than the one this relay began with ({self._store_id})",
                hint="`paramserver adopt` joins it with what is held here; a restart keeps that aside",
            )
        mark = keys.store_mark(found)
        await self._registry.transact([Absent(mark), Created(keys.STORE, state.entries[0].created)], [Put(mark, b"")])
        marked = (await self._registry.list(mark)).entries
        if not marked:
            raise Unavailable("the registry was replaced by another between two calls")
        self.store_guard = Created(mark, marked[0].created)
        if found != self._store_id:
            self._listed = self._seen = 0
        self._store_id, self.foreign_store = found, ""
        self.view.store_id = found

    async def _register(self) -> bool:
        lease = await self._registry.grant(self._ttl_s)
        key = keys.member_key(self.member.name)
        outcome = await self._registry.transact([Absent(key)], [Put(key, msgspec.json.encode(self.member), lease)])
        if not outcome.succeeded:
            await self._registry.revoke(lease)
            return False
        self.lease_id = lease
        self.holdings.write_on(lease, Created(key, outcome.revision))
        return True

    async def adopt(self) -> str:
        """Joins the store that is there now, under the same name; returns its id. Conflict when it is the same one.

        A call that failed half-way is made again, until `adopted` ends the adoption.
        """
        before, earlier = self._store_id, self._adopting | self.view.continues | {self._store_id}
        await self.check_store(adopting=True)
        if self._store_id == before and not self._adopting and await self._registry.keep_alive(self.lease_id):
            raise Conflict(f"etcd is the store that {self.member.name} belongs to ({before})", hint="nothing to adopt")
        self._adopting = earlier - {self._store_id}
        await self.continue_stores(self._adopting)
        self._another_store.set()
        await self._take_name()
        self.reachable = True
        return self._store_id

    def adopted(self) -> None:
        """All that an adoption writes is written."""
        self._adopting = frozenset()

    async def continue_stores(self, earlier: Collection[str]) -> None:
        """Records that the versions of those earlier stores go on in this one."""
        for part in parts([Put(keys.continues_key(store_id), b"") for store_id in sorted(earlier)]):
            await self._registry.transact([self.store_guard], part)

    async def record_version(self, model: str, announced: Announced, sealed: Sealed) -> bool:
        """Records a version that this store lacks: of an earlier one, or of its own past, if it was restored from a
        backup. False: its number is here already, or its model was dropped."""
        wanted = self.view.created(keys.wanted_key(model))
        if wanted is None:
            return False
        announced_key, sealed_key = (keys.version_key(model, sealed.version, what) for what in ("announced", "sealed"))
        ended_key = keys.version_key(model, sealed.version, "ended")
        # A backup may have been made between the two: then the announcement is there, of the same version.
        begun = self.view.created(announced_key) if self.view.has_announced(announced.manifest) else None
        guards = (
            self.store_guard,
            Created(keys.wanted_key(model), wanted),
            Absent(announced_key) if begun is None else Created(announced_key, begun),
            Absent(sealed_key),
            Absent(ended_key),
        )
        writes = [Put(announced_key, msgspec.json.encode(announced)), Put(sealed_key, msgspec.json.encode(sealed))]
        outcome = await self._registry.transact(guards, writes)
        if outcome.succeeded:
            log.info("%s version %d is recorded in the new registry", model, sealed.version)
        return outcome.succeeded

    async def drain(self) -> None:
        """Records that this relay takes no more: no chain, no election, no new version. Idempotent."""
        self.member = msgspec.structs.replace(self.member, draining=True, publish_host=False)
        if self.view.members.get(self.member.name) != self.member:
            key = keys.member_key(self.member.name)
            await self._registry.transact([], [Put(key, msgspec.json.encode(self.member), self.lease_id)])

    # ---- tasks

    async def keep(self) -> None:
        """Keeps the lease; registers again when it was lost."""
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            with self._failures.contained("the lease in the registry is not kept"):
                try:
                    await self._keep_once()
                except Unavailable as error:
                    self._cannot_use("the registry is away", error)
                    continue
                try:
                    await self._try_writes()
                except Unavailable as error:
                    self._cannot_use("the registry answers, and takes no writes", error)
                    continue
                self.reachable = True

    def _cannot_use(self, why: str, error: Unavailable) -> None:
        why = f"{why}: {error}"
        if self.reachable:
            log.warning("going on with the last view: %s", why)
        self.reachable, self._unusable_because = False, why

    async def _try_writes(self) -> None:
        """A lease is kept by an etcd that is full, too, and takes no writes. This one changes nothing: its guard never
        holds."""
        if self.reachable and time.monotonic() - self._writes_tried_at < WRITES_TRIED_S:
            return
        await self._registry.transact([Created(keys.STORE, -1)], [Put(keys.STORE, b"")])
        self._writes_tried_at = time.monotonic()

    async def _keep_once(self) -> None:
        if await self._registry.keep_alive(self.lease_id):
            self._taken_by = ""
            return
        if self.reachable and not self._taken_by:
            log.warning("the lease was lost; registering again")
        await self.check_store()
        if await self._register():
            self._taken_by = ""
        else:
            await self._note_taken()

    async def _note_taken(self) -> None:
        """Logs that another process registered under this name: once for each such process. A registration of this one
        is none: `adopt` made it meanwhile, or its reply was lost, and it ends with its lease."""
        found = await self._registry.list(keys.member_key(self.member.name))
        other = next((e.value for e in found.entries if e.key == keys.member_key(self.member.name)), None)
        if other is None:  # gone again: the next try takes the name
            return
        try:
            found_member = decode_json(other, Member)
        except msgspec.MsgspecError:
            address = "an unknown address"
        else:
            if found_member.instance == self.member.instance:
                return
            address = found_member.grpc_address
        taken_by = f"the name {self.member.name} was taken by another relay, at {address}, while this one had no lease"
        if taken_by != self._taken_by:
            log.error("%s; this one is no member until that one ends", taken_by)
        self._taken_by = taken_by

    async def follow(self) -> AsyncIterator[list[Fact]]:
        """The registry's state and changes as facts, in order, for ever."""
        while True:
            self._another_store.clear()
            events = self._registry.watch(keys.ROOT)
            with self._failures.contained("the watch on the registry ended and begins anew"):
                while (event := await self._next(events)) is not None:
                    yield [] if self._is_foreign(event) else self._facts(event)
                continue
            await asyncio.sleep(RETRY_S)

    async def _next(self, events: AsyncIterator[Event]) -> Event | None:
        """The next event; None when another store was adopted: the watch must begin anew there."""
        event, adopted = asyncio.ensure_future(anext(events)), asyncio.ensure_future(self._another_store.wait())
        try:
            await asyncio.wait([event, adopted], return_when=asyncio.FIRST_COMPLETED)
            return await event if event.done() else None
        finally:
            going: set[asyncio.Future[Any]] = {event, adopted}
            # grpc.aio may swallow a cancellation that comes while its call fails: the task goes on, and is cancelled
            # again.
            while going:
                for task in going:
                    task.cancel()
                _, going = await asyncio.wait(going, timeout=RETRY_S)

    def _facts(self, event: Event) -> list[Fact]:
        match event:
            case State():
                return self._replace(event)
            case Changed(_, revision) | Removed(_, revision) if revision <= self._listed:
                return []
            case Changed(entry, revision):
                self._seen = max(self._seen, revision)
                self.holdings.compare(entry.key, entry.value)
                facts = self.view.put(entry.key, entry.value, entry.created)
                self._note_unreadable()
                return facts
            case Removed(key, revision):
                self._seen = max(self._seen, revision)
                self.holdings.compare(key, None)
                return self.view.remove(key)

    def _replace(self, state: State) -> list[Fact]:
        self._listed = self._seen = state.revision
        self.holdings.compare_all({entry.key: entry.value for entry in state.entries})
        facts = self.view.replace([(e.key, e.value, e.created) for e in state.entries])
        self._note_unreadable()
        return facts

    def _note_unreadable(self) -> None:
        for key in sorted(self.view.unreadable.keys() - self._unreadable):
            log.warning("left alone: %r in the registry cannot be read: %s", key[:200], self.view.unreadable[key][:500])
        self._unreadable = set(self.view.unreadable)

    def _is_foreign(self, event: Event) -> bool:
        """Whether the event comes from another store. A state without a store id is one that was wiped."""
        if isinstance(event, State) and self._store_id:
            found = next((e.value.decode() for e in event.entries if e.key == keys.STORE), "none")
            self._note_foreign("" if found == self._store_id else found)
        return bool(self.foreign_store)

    def _note_foreign(self, found: str) -> None:
        if found and not self.foreign_store:
            log.error("the registry is another store now (%s); `paramserver adopt` joins it", found)
        self.foreign_store = found

    async def refresh(self) -> list[Fact]:
        """Reads the whole registry now, without waiting for the watch. Empty when the watch has overtaken the reply."""
        state = await self._registry.list(keys.ROOT)
        if self._is_foreign(state) or state.revision < self._seen:
            return []
        return self._replace(state)
