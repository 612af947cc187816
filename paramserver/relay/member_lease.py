"""A relay's membership in the registry: its lease, its name, what it holds, and the elections it wins.

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
from typing import Any

import msgspec

from paramserver.core import view as keys
from paramserver.core.election import candidacy
from paramserver.core.records import Announced, Epoch, Holding, Master, Member, RegisteredEngine, Sealed
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
    parts,
)
from paramserver.troubles import Troubles
from protos.decoding import decode_json
from protos.errors import Conflict, StaleEpoch, Unavailable

log = logging.getLogger(__name__)

RETRY_S = 0.3


class MemberLease:
    """One relay's dealings with the registry."""

    def __init__(self, registry: Registry, member: Member, *, ttl_s: float) -> None:
        self._registry = registry
        self.member = member
        self._ttl_s = ttl_s
        self.view = View()
        self.reachable = True
        self.foreign_store = ""
        self._taken_by = ""  # who has this relay's name, in words
        self._away = ""  # why the registry cannot be reached
        self._store_id = ""
        self._mark = Created("", 0)  # a key that only this store has
        self._listed = self._seen = 0  # revision of the list in the view; the newest that came by list or by watch
        self._lease = 0
        self._registered: Created | None = None  # this process's own registration, for as long as its lease is kept
        self._held: dict[str, bytes] = {}  # keys that say what this relay has, on its lease
        self._written: dict[str, bytes | None] = {}  # what the registry has on this lease; None: a write in doubt
        self._differing: set[str] = set()  # keys that the registry showed otherwise than they are held
        self._unreadable: set[str] = set()  # keys that were logged
        self._troubles = Troubles(log)
        self._holders_changed = asyncio.Event()
        self._vacant_since: dict[str, float] = {}
        self._adopted = asyncio.Event()

    @property
    def registry(self) -> Registry:
        return self._registry

    @property
    def name_taken(self) -> bool:
        """Whether another process has this relay's name: then this one is no member."""
        return bool(self._taken_by)

    @property
    def trouble(self) -> str:
        """Why this relay has no seat in the registry, in words for people; empty when it has one."""
        if self.foreign_store:
            return (
                f"the registry is another store ({self.foreign_store}) than this relay's ({self._store_id}): "
                "it takes nothing new until `paramserver adopt`"
            )
        if self._taken_by:
            return f"{self._taken_by}: this one is no member, and takes and seals nothing; give it another --name"
        return "" if self.reachable else f"the registry is away: {self._away}"

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
        self._lease, self._registered = lease, Created(key, outcome.revision)
        self._written.clear()
        self._holders_changed.set()
        return True

    async def adopt(self) -> str:
        """Joins the store that is there now, under the same name; returns its id. Conflict when it is the same one."""
        before, earlier = self._store_id, self.view.continues | {self._store_id}
        await self.check_store(adopting=True)
        if self._store_id == before and await self._registry.keep_alive(self._lease):
            raise Conflict(f"etcd is the store that {self.member.name} belongs to ({before})", hint="nothing to adopt")
        await self.go_on_with(earlier - {self._store_id})
        self._adopted.set()
        await self._take_name()
        self.reachable = True
        return self._store_id

    async def go_on_with(self, earlier: Collection[str]) -> None:
        """Records that the versions of those earlier stores go on in this one."""
        for part in parts([Put(keys.continues_key(store_id), b"") for store_id in sorted(earlier)]):
            await self._registry.transact([self._mark], part)

    async def bring_along(self, model: str, announced: Announced, sealed: Sealed) -> bool:
        """Records a version of an earlier store in this one. False: it is here already, or its model was dropped."""
        wanted = self.view.created(keys.wanted_key(model))
        if wanted is None:
            return False
        announced_key, sealed_key = (keys.version_key(model, sealed.version, what) for what in ("announced", "sealed"))
        guards = (self._mark, Created(keys.wanted_key(model), wanted), Absent(announced_key), Absent(sealed_key))
        writes = [Put(announced_key, msgspec.json.encode(announced)), Put(sealed_key, msgspec.json.encode(sealed))]
        outcome = await self._registry.transact(guards, writes)
        if outcome.succeeded:
            log.info("%s version %d is recorded in the new registry", model, sealed.version)
        return outcome.succeeded

    async def drain(self) -> None:
        """Tells everybody that this relay takes no more: no chain, no election, no new version.

        Called again it tells it again only if the registry has not heard of it.
        """
        self.member = msgspec.structs.replace(self.member, draining=True, publish_host=False)
        if self.view.members.get(self.member.name) != self.member:
            key = keys.member_key(self.member.name)
            await self._registry.transact([], [Put(key, msgspec.json.encode(self.member), self._lease)])

    # ---- tasks

    async def keep(self) -> None:
        """Keeps the lease; takes the seat again when it was lost."""
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            with self._troubles.contained("the lease in the registry is not kept"):
                try:
                    await self._keep_once()
                    self.reachable = True
                except Unavailable as error:
                    if self.reachable:
                        log.warning("going on with the last view: %s", error)
                    self.reachable, self._away = False, str(error)

    async def _keep_once(self) -> None:
        if await self._registry.keep_alive(self._lease):
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
        """Another process registered under this name: said once, and again when it is yet another."""
        found = await self._registry.list(keys.member_key(self.member.name))
        other = next((e.value for e in found.entries if e.key == keys.member_key(self.member.name)), None)
        if other is None:  # gone again: the next try takes the name
            return
        try:
            address = decode_json(other, Member).grpc_address
        except msgspec.MsgspecError:
            address = "an unknown address"
        taken_by = f"the name {self.member.name} was taken by another relay, at {address}, while this one had no lease"
        if taken_by != self._taken_by:
            log.error("%s; this one is no member until that one ends", taken_by)
        self._taken_by = taken_by

    async def follow(self) -> AsyncIterator[list[Fact]]:
        """The registry's state and changes as facts, in order, for ever."""
        while True:
            self._adopted.clear()
            events = self._registry.watch(keys.ROOT)
            with self._troubles.contained("the watch on the registry ended and begins anew"):
                while (event := await self._next(events)) is not None:
                    yield [] if self._is_foreign(event) else self._facts(event)
                continue
            await asyncio.sleep(RETRY_S)

    async def _next(self, events: AsyncIterator[Event]) -> Event | None:
        """The next event; None when another store was adopted: the watch must begin anew there."""
        event, adopted = asyncio.ensure_future(anext(events)), asyncio.ensure_future(self._adopted.wait())
        try:
            await asyncio.wait([event, adopted], return_when=asyncio.FIRST_COMPLETED)
            return await event if event.done() else None
        finally:
            going: set[asyncio.Future[Any]] = {event, adopted}
            while going:  # the library takes a cancellation that comes while its call fails for its own
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
                self._compare_with_held(entry.key, entry.value)
                facts = self.view.put(entry.key, entry.value, entry.created)
                self._note_unreadable()
                return facts
            case Removed(key, revision):
                self._seen = max(self._seen, revision)
                self._compare_with_held(key, None)
                return self.view.remove(key)

    def _replace(self, state: State) -> list[Fact]:
        self._listed = self._seen = state.revision
        found = {entry.key: entry.value for entry in state.entries}
        for key in found.keys() | self._held.keys():
            self._compare_with_held(key, found.get(key))
        facts = self.view.replace([(e.key, e.value, e.created) for e in state.entries])
        self._note_unreadable()
        return facts

    def _compare_with_held(self, key: str, found: bytes | None) -> None:
        """What the registry has of this relay's copies is written again where it differs from what is held.

        The registry may carry out a write that it did not answer after later ones that it did: only what the watch
        shows is certain. An event that is older than the newest write costs one write that changes nothing.
        """
        if keys.is_own_copy(key, self.member.name) and self._held.get(key) != found:
            self._differing.add(key)
            self._holders_changed.set()

    def _note_unreadable(self) -> None:
        for key in sorted(self.view.unreadable.keys() - self._unreadable):
            log.warning("left alone: %r in the registry cannot be read: %s", key[:200], self.view.unreadable[key][:500])
        self._unreadable = set(self.view.unreadable)

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
        """Writes what this relay has, as it comes and goes."""
        while True:
            await self._holders_changed.wait()
            self._holders_changed.clear()
            what = "the registry does not know all that is held here"
            with self._troubles.contained(what):
                await self._write_holdings()
            if self._troubles.is_known(what):
                self._holders_changed.set()
                await asyncio.sleep(RETRY_S)

    async def _write_holdings(self) -> None:
        """In parts, since after a lost lease all of it is written again; the newest versions first."""
        lease, registered = self._lease, self._registered
        if registered is None:
            return
        self._written |= dict.fromkeys(self._differing)
        self._differing.clear()
        writes: list[Write] = [
            Put(key, value, lease)
            for key, value in sorted(self._held.items(), reverse=True)
            if self._written.get(key) != value
        ]
        writes += [Delete(key) for key in sorted(self._written.keys() - self._held.keys())]
        for part in parts(writes):
            # Until the registry answers, each of these keys may be there or not: a key whose write was carried out
            # without an answer, and that is not wanted any more, would say for as long as the lease that it is held.
            self._written |= {write.key: None for write in part}
            outcome = await self._registry.transact([registered], part)
            # Without the lease another relay may have taken the name, and these keys are that one's. Whoever registers
            # anew, now or meanwhile, writes all of it again.
            if not outcome.succeeded or self._lease != lease:
                return
            for write in part:
                if isinstance(write, Put):
                    self._written[write.key] = write.value
                else:
                    self._written.pop(write.key, None)

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
        if self.member.draining:
            return []
        won = []
        for model in sorted(self.view.models):
            with self._troubles.contained(f"this relay does not stand for master of {model}"):
                if await self._stand(model, newest_holders.get(model, set()), now):
                    won.append(model)
        return won

    async def _stand(self, model: str, newest_holders: Collection[str], now: float) -> bool:
        if model in self.view.masters:
            self._vacant_since.pop(model, None)
            return False
        since = self._vacant_since.setdefault(model, now)
        delay_s, reason = candidacy(self.member.name, list(self.view.members.values()), newest_holders)
        if now - since < delay_s:
            return False
        # A model that was dropped meanwhile must not be made again by its election, and looks masterless until it is
        # forgotten here: only the model that this relay has seen wanted is stood for.
        wanted = self.view.created(keys.wanted_key(model))
        if wanted is None or not await self.campaign(model, [Created(keys.wanted_key(model), wanted)]):
            return False
        log.info("elected master of %s (%s)", model, reason)
        return True

    async def campaign(self, model: str, guards: Sequence[Guard] = ()) -> bool:
        """Tries to become master at once, and makes the model known. False when somebody else is, or a guard failed."""
        master = Master(self.member.name, self.member.instance)
        key = keys.master_key(model)
        outcome = await self._registry.transact(
            [Absent(key), Created(keys.member_key(self.member.name), await self._member_revision()), *guards],
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
