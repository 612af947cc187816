"""A relay's seat in the registry: its lease, its name, what it holds, and the elections it wins.

Invariants:
- one live holder per name: a second is refused;
- every key that says "alive", "master" or "holder" hangs on this relay's lease, and vanishes with it;
- a relay that finds another store id than the one it began with takes no seat there: revisions of a wiped
  registry start again, and old epochs would look new. A master's transaction names the store in its guards, for
  the registry may be replaced between two calls;
- the view goes forward only: what the watch repeats of a list read meanwhile is skipped, and a list older than what
  the watch has told is not taken.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Collection, Sequence

import msgspec

from paramserver.core import view as keys
from paramserver.core.election import candidacy
from paramserver.core.records import Epoch, Holding, Master, Member, RegisteredEngine
from paramserver.core.view import Fact, View
from paramserver.membership.registry import (
    Absent,
    Changed,
    Created,
    Delete,
    Event,
    Guard,
    Put,
    Registry,
    Removed,
    State,
    Write,
)
from protos.errors import Conflict, StaleEpoch, Unavailable

log = logging.getLogger(__name__)

RETRY_S = 0.3


class Seat:
    """One relay's dealings with the registry."""

    def __init__(self, registry: Registry, member: Member, *, ttl_s: float) -> None:
        self._registry = registry
        self.member = member
        self._ttl_s = ttl_s
        self.view = View()
        self.reachable = True
        self.foreign_store = ""
        self._store_id = ""
        self._mark = Created("", 0)  # a key that only this store has
        self._listed = self._seen = 0  # revision of the list in the view; the newest that came by list or by watch
        self._lease = 0
        self._held: dict[str, bytes] = {}  # keys that say what this relay has, on its lease
        self._written: set[str] = set()
        self._holders_changed = asyncio.Event()
        self._vacant_since: dict[str, float] = {}
        self._adopted = asyncio.Event()

    @property
    def registry(self) -> Registry:
        return self._registry

    # ---- taking and leaving the seat

    async def take(self) -> None:
        """Registers. Waits for an earlier life's lease to run out; Conflict when the name is really in use."""
        await self.check_store()
        await self._take_name()

    async def _take_name(self) -> None:
        deadline = time.monotonic() + 2 * self._ttl_s + 1.0
        while not await self._register():
            if self._lease and await self._registry.keep_alive(self._lease):  # `keep` was quicker
                return
            if time.monotonic() > deadline:
                raise Conflict(
                    f"a relay named {self.member.name!r} is alive already", hint="give each relay its own --name"
                )
            await asyncio.sleep(RETRY_S)

    async def leave(self) -> None:
        """Gives the lease up, so that others need not wait for it to run out."""
        try:
            await self._registry.revoke(self._lease)
        except Unavailable as error:
            log.warning("the lease runs out by itself: %s", error)

    async def check_store(self, *, adopting: bool = False) -> None:
        """Remembers which store this is. Unavailable when it is another one than before, unless that is adopted."""
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
                hint="`paramserver adopt` joins it with what is held here; a restart joins it without",
            )
        mark = keys.store_mark(found)
        await self._registry.transact([Absent(mark), Created(keys.STORE, state.entries[0].created)], [Put(mark, b"")])
        marked = (await self._registry.list(mark)).entries
        if not marked:
            raise Unavailable("the registry was replaced by another between two calls")
        self._mark = Created(mark, marked[0].created)
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
        self._lease = lease
        self._written.clear()
        self._holders_changed.set()
        return True

    async def adopt(self) -> str:
        """Joins the store that is there now, under the same name; returns its id. Conflict when it is the same one."""
        before = self._store_id
        await self.check_store(adopting=True)
        if self._store_id == before and await self._registry.keep_alive(self._lease):
            raise Conflict(f"etcd is the store that {self.member.name} belongs to ({before})", hint="nothing to adopt")
        self._adopted.set()
        await self._take_name()
        return self._store_id

    async def drain(self) -> None:
        """Tells everybody that this relay takes no more: no chain, no election, no new version."""
        self.member = msgspec.structs.replace(self.member, draining=True, publish_host=False)
        key = keys.member_key(self.member.name)
        await self._registry.transact([], [Put(key, msgspec.json.encode(self.member), self._lease)])

    # ---- tasks

    async def keep(self) -> None:
        """Keeps the lease; takes the seat again when it was lost."""
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            try:
                if not await self._registry.keep_alive(self._lease):
                    if self.reachable:
                        log.warning("the lease was lost; registering again")
                    await self.check_store()
                    await self._register()
                self.reachable = True
            except Unavailable as error:
                if self.reachable:
                    log.warning("going on with the last view: %s", error)
                self.reachable = False

    async def follow(self) -> AsyncIterator[list[Fact]]:
        """The registry's state and changes as facts, in order, for ever."""
        while True:
            self._adopted.clear()
            events = self._registry.watch(keys.ROOT)
            while (event := await self._next(events)) is not None:
                yield [] if self._is_foreign(event) else self._facts(event)

    async def _next(self, events: AsyncIterator[Event]) -> Event | None:
        """The next event; None when another store was adopted: the watch must begin anew there."""
        event, adopted = asyncio.ensure_future(anext(events)), asyncio.ensure_future(self._adopted.wait())
        try:
            await asyncio.wait([event, adopted], return_when=asyncio.FIRST_COMPLETED)
            return await event if event.done() else None
        finally:
            for task in (event, adopted):
                task.cancel()
            await asyncio.wait([event, adopted])

    def _facts(self, event: Event) -> list[Fact]:
        match event:
            case State():
                return self._replace(event)
            case Changed(_, revision) | Removed(_, revision) if revision <= self._listed:
                return []
            case Changed(entry, revision):
                self._seen = max(self._seen, revision)
                return self.view.put(entry.key, entry.value, entry.created)
            case Removed(key, revision):
                self._seen = max(self._seen, revision)
                return self.view.remove(key)

    def _replace(self, state: State) -> list[Fact]:
        self._listed = self._seen = state.revision
        return self.view.replace([(e.key, e.value, e.created) for e in state.entries])

    def _is_foreign(self, event: Event) -> bool:
        """Whether the watch speaks for another store. A state without a store id is one that was wiped."""
        if isinstance(event, State) and self._store_id:
            found = next((e.value.decode() for e in event.entries if e.key == keys.STORE), "none")
            self._note_foreign("" if found == self._store_id else found)
        return bool(self.foreign_store)

    def _note_foreign(self, found: str) -> None:
        if found and not self.foreign_store:
            log.error("the registry is another store now (%s); `paramserver adopt` joins it", found)
        self.foreign_store = found

    async def tell_holdings(self) -> None:
        """Writes which versions this relay holds, as they come and go."""
        while True:
            await self._holders_changed.wait()
            self._holders_changed.clear()
            held, written = set(self._held), set(self._written)
            writes: list[Write] = [Put(key, self._held[key], self._lease) for key in sorted(held - written)]
            writes += [Delete(key) for key in sorted(written - held)]
            try:
                if writes:
                    await self._registry.transact([], writes)
                self._written = held
            except Unavailable:
                self._holders_changed.set()
                await asyncio.sleep(RETRY_S)

    def hold(self, model: str, version: int, holding: Holding) -> None:
        """This relay holds the version complete, verified and sealed."""
        self._tell(keys.holder_key(model, version, self.member.name), msgspec.json.encode(holding))

    def unhold(self, model: str, version: int) -> None:
        self._tell(keys.holder_key(model, version, self.member.name), None)

    def register(self, engines: Sequence[RegisteredEngine]) -> None:
        """Engines beside this relay; gateways see them as long as its lease holds."""
        for engine in engines:
            self._tell(keys.engine_key(engine.name), msgspec.json.encode(engine))

    def spilled(self, versions: Collection[tuple[str, int]]) -> None:
        """All (model, version) that this relay can read back from its disk."""
        name = self.member.name
        wanted = {keys.spilled_key(model, version, name) for model, version in versions}
        for key in [key for key in self._held if keys.is_spilled(key) and key not in wanted]:
            self._tell(key, None)
        for key in wanted:
            self._tell(key, b"")

    def _tell(self, key: str, value: bytes | None) -> None:
        if self._held.get(key) == value:
            return
        if value is None:
            del self._held[key]
        else:
            self._held[key] = value
        self._holders_changed.set()

    # ---- elections

    def is_master(self, model: str) -> bool:
        seen = self.view.masters.get(model)
        return seen is not None and seen.master.instance == self.member.instance

    def epoch(self, model: str) -> Epoch | None:
        """The epoch in which this relay is master of the model; None when it is not."""
        return self.view.epoch(model) if self.is_master(model) else None

    async def want(self, model: str) -> None:
        """Makes the model known, so that somebody stands for its master."""
        await self._registry.transact([Absent(keys.wanted_key(model))], [Put(keys.wanted_key(model), b"")])

    async def skip_numbers(self, model: str, number: int) -> None:
        """No master gives a number below this one, not even after this relay has died."""
        await self._registry.transact([], [Put(keys.skipped_key(model, self.member.name), str(number).encode())])

    async def stand(self, newest_holders: dict[str, set[str]], now: float) -> list[str]:
        """Stands for master of each known model that has none, when it is this relay's turn. Returns those won."""
        won: list[str] = []
        if self.member.draining:
            return won
        for model in sorted(self.view.models):
            if model in self.view.masters:
                self._vacant_since.pop(model, None)
                continue
            since = self._vacant_since.setdefault(model, now)
            delay_s, reason = candidacy(
                self.member.name, list(self.view.members.values()), newest_holders.get(model, set())
            )
            if now - since >= delay_s and await self.campaign(model):
                log.info("elected master of %s (%s)", model, reason)
                won.append(model)
        return won

    async def campaign(self, model: str) -> bool:
        """Tries to become master at once. False when somebody else is."""
        master = Master(self.member.name, self.member.instance)
        key = keys.master_key(model)
        outcome = await self._registry.transact(
            [Absent(key), Created(keys.member_key(self.member.name), await self._member_revision())],
            [Put(key, msgspec.json.encode(master), self._lease), Put(keys.wanted_key(model), b"")],
        )
        return outcome.succeeded

    async def _member_revision(self) -> int:
        state = await self._registry.list(keys.member_key(self.member.name))
        mine = [e for e in state.entries if e.key == keys.member_key(self.member.name)]
        return mine[0].created if mine else -1

    async def as_master(self, epoch: Epoch, model: str, guards: Sequence[Guard], writes: Sequence[Write]) -> bool:
        """A transaction that holds only while this relay's election does. False when a guard failed.

        Raises Unavailable when the outcome is in doubt, StaleEpoch when the election is known to be over.
        """
        if self.epoch(model) != epoch:
            raise StaleEpoch(f"{self.member.name} is no longer master of {model} in epoch {epoch}")
        fence = Created(keys.master_key(model), epoch.revision)
        outcome = await self._registry.transact([self._mark, fence, *guards], writes)
        return outcome.succeeded

    async def refresh(self) -> list[Fact]:
        """Reads the whole registry now, without waiting for the watch, which may have overtaken the answer."""
        state = await self._registry.list(keys.ROOT)
        if self._is_foreign(state) or state.revision < self._seen:
            return []
        return self._replace(state)
