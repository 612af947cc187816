"""A master's standing duties: win elections, settle what an earlier master left, note what was lost, prune, resign.

Beside them each relay records the versions that it brought along into a registry that it adopted.

Invariants:
- before it announces anything, a new master ends what an earlier one announced and never sealed;
- what is known to have ended here ends in the registry, too, as soon as that can be reached;
- every write holds only while this relay's election does, but for what it brings along into a registry that it adopted;
- only the newest sealed version can be lost: older ones retire by design. It is not lost while a live relay may hold
  it, whatever the registry has heard: every member is asked before;
- no model waits for another: each is presided over by a task of its own, one at a time, beside the elections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from paramserver.client.relay import RelayClient
from paramserver.core import view as keys
from paramserver.core.records import Ended, Epoch, Member
from paramserver.master.drafts import Drafts
from paramserver.master.sealer import end_version
from paramserver.membership.registry import Delete, Put, Write, parts
from paramserver.relay.member_lease import RETRY_S
from paramserver.relay.relay import VERSIONS_KEPT, Relay
from paramserver.troubles import Troubles
from protos.errors import LaminarError, StaleEpoch, Unavailable, UnknownModel

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 2.0  # for another relay to say what it holds
UNUSED_S = 600.0  # a model of which nothing was ever published is forgotten
LOST_GRACE_S = 10.0  # holders whose lease lapsed in an outage get this long to register again


def ask_soon(address: str) -> RelayClient:
    """A client of another relay that answers soon or counts as silent."""
    return RelayClient(address, timeout_s=ASK_TIMEOUT_S)


class MasterDuties:
    """What this relay does for the models of which it is, or may become, master."""

    def __init__(
        self, relay: Relay, drafts: Drafts, *, dial: Callable[[str], RelayClient], in_use: Callable[[str], bool]
    ) -> None:
        """`dial` makes a client of another relay, by the address of its gRPC port. `in_use`: a publisher is there."""
        self._in_use = in_use
        self._unused_since: dict[str, float] = {}
        self._relay = relay
        self._drafts = drafts
        self._dial = dial
        self._troubles = Troubles(log)
        self._presided: set[str] = set()  # models with a task of `preside` under way
        self._settled: dict[str, Epoch] = {}
        self._brought: set[tuple[str, str, int]] = set()  # (store, model, version) shown and recorded here
        self._lost_since: dict[tuple[str, int], float] = {}

    async def preside(self) -> None:
        """Stands in elections; beside them settles what earlier masters left, and records what was lost."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(RETRY_S / 2)
                with self._troubles.contained("the registry does not know all that this relay brought along"):
                    await self._bring_along()
                won: list[str] = []
                with self._troubles.contained("this relay stands in no election"):
                    won = await self._relay.seat.stand(self._newest_holders(), time.monotonic())
                for model in sorted({*won, *self._mastered()} - self._presided):
                    self._presided.add(model)
                    group.create_task(self._preside_over(model))

    async def _preside_over(self, model: str) -> None:
        """Once. Whatever fails costs this model alone, until the next time: no error leaves the task."""
        try:
            with self._troubles.contained(f"as master of {model} this relay leaves something undone"):
                await self._do_duties(model)
        finally:
            self._presided.discard(model)

    async def _do_duties(self, model: str) -> None:
        try:
            await self.settle(model)  # again, when an answer was lost in the election or in settling
            await self._record_ends(model)
            await self._note_lost(model)
            await self._prune(model)
            await self._end_unused(model)
        except StaleEpoch as error:
            log.info("%s", error)

    async def settle(self, model: str) -> None:
        """Once in each epoch: reads everything, then ends what an earlier master announced and never sealed."""
        epoch = self._relay.seat.epoch(model)
        if epoch is not None and self._settled.get(model) == epoch:
            return
        await self._relay.refresh()
        epoch = self._relay.seat.epoch(model)
        if epoch is None:
            return
        for version, state in self._relay.of(model).items():
            if state.announced is None or state.sealed is not None or state.ended is not None:
                continue
            begun = state.announced.manifest.epoch
            if begun.store_id == epoch.store_id and begun != epoch:  # nobody here knows what came of another store's
                await end_version(
                    self._relay.seat, model, version, epoch, Ended("aborted", "its master died before it was sealed")
                )
        self._settled[model] = epoch

    async def _record_ends(self, model: str) -> None:
        """Ends in the registry what this relay gave up while that was away, or while this relay had no lease.

        Nobody else would: for the others the version goes on, and with it their fetches and its tickets.
        """
        epoch, view = self._relay.seat.epoch(model), self._relay.view
        for version, state in self._relay.of(model).items():
            if epoch is None or state.ended is None or view.knows(keys.version_key(model, version, "ended")):
                continue
            if view.knows(keys.version_key(model, version, "announced")):
                await end_version(self._relay.seat, model, version, epoch, state.ended)

    async def _note_lost(self, model: str) -> None:
        """Records sealed versions that nobody has held for a while. The newest decide; old ones retire by design."""
        newest = self._relay.of(model).newest_sealed
        if newest is None:
            return
        if not self._is_missed(model, newest):
            self._lost_since.pop((model, newest), None)
            return
        since = self._lost_since.setdefault((model, newest), time.monotonic())
        if time.monotonic() - since <= LOST_GRACE_S:
            return
        what = f"{model} version {newest} has no holder in the registry and is not recorded as lost"
        with self._troubles.contained(what):
            if may_hold := await self._who_may_hold(model, newest):
                self._lost_since[model, newest] = time.monotonic()  # asked again after another while
                raise Unavailable("; ".join(may_hold))
        epoch = self._relay.seat.epoch(model)
        if not self._troubles.is_known(what) and epoch is not None and self._is_missed(model, newest):
            await end_version(self._relay.seat, model, newest, epoch, Ended("lost", "no verified holder is left"))

    def _is_missed(self, model: str, version: int) -> bool:
        """Whether nobody is known to hold the version that was sealed."""
        state = self._relay.of(model).get(version)
        return state is not None and not (state.holders or state.spilled or state.stage in ("complete", "shown"))

    async def _who_may_hold(self, model: str, version: int) -> list[str]:
        """What the other live relays say of a version that the registry has no holder of; empty: none has it."""
        members = [m for name, m in self._relay.view.members.items() if name != self._relay.config.name]
        answers = await asyncio.gather(*(self._ask(member, model, version) for member in members))
        return sorted(filter(None, answers))

    async def _ask(self, member: Member, model: str, version: int) -> str:
        try:
            async with self._dial(member.grpc_address) as peer:
                held = await peer.versions(model)
        except UnknownModel:
            return ""
        except LaminarError as error:
            return f"{member.name} does not answer: {error}"
        return f"{member.name} holds it" if version in [one.version for one in held] else ""

    async def _prune(self, model: str) -> None:
        """Deletes the registry's records of versions long past, so that it does not grow without bound."""
        versions = self._relay.of(model)
        epoch = self._relay.seat.epoch(model)
        old = versions.forgettable(VERSIONS_KEPT, self._relay.view.pinned_versions(model))
        if epoch is None or not old:
            return
        writes = [Delete(keys.version_key(model, v, what)) for v in old for what in ("announced", "sealed", "ended")]
        for part in parts(writes):
            if not await self._relay.seat.as_master(epoch, model, [], part):
                return
        versions.forget(old)  # not before: what is forgotten here is deleted by nobody

    # ---- leaving, and joining another registry

    async def resign(self, model: str) -> bool:
        """Gives the model to whoever is elected next; False while a version of it is being written or sealed."""
        epoch = self._relay.seat.epoch(model)
        busy = self._drafts.busy(model)
        if epoch is None or busy:
            return not busy
        await self._relay.seat.as_master(epoch, model, [], [Delete(keys.master_key(model))])
        return True

    async def drop(self, model: str) -> list[int]:
        """Ends a model with all its versions; the numbers of those that this relay held. StaleEpoch when not master.

        What says so comes first: whoever sees nothing else of it gives the versions up all the same.
        """
        relay, versions = self._relay, self._relay.of(model)
        epoch = relay.seat.epoch(model)
        if epoch is None:
            raise StaleEpoch(f"{relay.config.name} is not master of {model}")
        held, number = [record.version for record in versions.shown()], versions.next_number
        master = keys.master_key(model)
        steps: list[list[Write]] = [[Put(keys.dropped_key(model), str(number).encode())]] if number > 1 else []
        steps += parts([Delete(key) for key in relay.view.keys_of(model) if key != master])
        steps.append([Delete(master)])
        for step in steps:
            if not await relay.seat.as_master(epoch, model, [], step):
                raise StaleEpoch(f"another relay became master of {model} while it was dropped", hint="drop it again")
        log.info("%s was dropped, with %s", model, f"versions {held}" if held else "no version")
        await relay.refresh()
        relay.wake()
        return held

    async def _end_unused(self, model: str) -> None:
        """Somebody asked for its master and never published: such names must not add up."""
        if not self._relay.of(model).empty or self._in_use(model):
            self._unused_since.pop(model, None)
            return
        if time.monotonic() - self._unused_since.setdefault(model, time.monotonic()) > UNUSED_S:
            del self._unused_since[model]
            await self.drop(model)

    async def _bring_along(self) -> None:
        """Records what is shown here and this registry never knew: it was replaced, and this relay adopted it.

        Each relay does so, not the master alone: it may hold a version that the master does not. Once for each version:
        what the master deletes later stays deleted.
        """
        relay, store_id = self._relay, self._relay.view.store_id
        shown = {
            (store_id, model, record.version): record
            for model, versions in relay.models.items()
            for record in versions.shown()
        }
        self._brought &= shown.keys()
        for name in sorted(shown.keys() - self._brought):
            _, model, version = name
            state = relay.of(model).get(version)
            if state is None or state.announced is None or state.announced.manifest.epoch.store_id == store_id:
                continue
            known = relay.view.knows(keys.version_key(model, version, "sealed"))
            if not known and await relay.seat.bring_along(model, state.announced, shown[name]):
                self._brought.add(name)

    def _newest_holders(self) -> dict[str, set[str]]:
        """Of each model that wants a master."""
        found = {}
        for model, versions in self._relay.models.items():
            if model in self._relay.view.masters:
                continue
            newest = versions.newest_sealed
            state = versions.get(newest) if newest is not None else None
            found[model] = set(state.holders) if state is not None else set()
        return found

    def _mastered(self) -> list[str]:
        return sorted(model for model in self._relay.view.masters if self._relay.seat.is_master(model))
