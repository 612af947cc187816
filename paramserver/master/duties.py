"""A master's standing duties: win elections, settle what an earlier master left, record losses, prune, resign.

Beside them each relay records the versions that it holds in a registry that it adopted.

Invariants:
- before it announces anything, a new master ends what an earlier one announced and never sealed;
- what is known to have ended here ends in the registry, too, as soon as that can be reached;
- every write holds only while this relay's election does, except records of versions for a registry it adopted;
- only the newest sealed version can be lost: older ones retire by design. It is not lost while a live relay may hold
  it, whatever the registry has: every member is queried before;
- no model waits for another: each has a task of its own, one at a time, beside the elections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from paramserver.client.relay import RelayClient
from paramserver.core import access
from paramserver.core import view as keys
from paramserver.core.records import Ended, Epoch, Member, check_model_name
from paramserver.master.claims import RunClaims
from paramserver.master.drafts import Drafts
from paramserver.master.sealer import end_version
from paramserver.membership.registry import RETRY_S, Delete, Put, Write, parts
from paramserver.relay.elections import Elections
from paramserver.relay.member_lease import MemberLease
from paramserver.relay.models import VERSIONS_KEPT, ModelTable
from paramserver.relay.relay import Relay
from protos.access.credentials import Credentials
from protos.errors import Conflict, LaminarError, OutOfCapacity, StaleEpoch, Unavailable, UnknownModel
from protos.failures import FailureLog

log = logging.getLogger(__name__)

QUERY_TIMEOUT_S = 2.0  # for another relay to report what it holds
LOCATE_S = 10.0  # for an election, when a publisher looks for the master
LOCATE_POLL_S = 0.05
UNUSED_S = 600.0  # a model of which nothing was ever published is forgotten
LOST_GRACE_S = 10.0  # holders whose lease lapsed in an outage get this long to register again
MODELS_MAX = 128  # of a tier: each costs every relay some work, all the time


def dial_briefly(address: str, credentials: Credentials | None = None) -> RelayClient:
    """A client of another relay that answers soon or counts as silent."""
    return RelayClient(address, timeout_s=QUERY_TIMEOUT_S, credentials=credentials)


class MasterDuties:
    """The duties of this relay for the models of which it is, or may become, master."""

    def __init__(
        self,
        lease: MemberLease,
        elections: Elections,
        relay: Relay,
        *,
        models: ModelTable,
        drafts: Drafts,
        claims: RunClaims,
        dial: Callable[[str], RelayClient],
    ) -> None:
        """`dial` makes a client of another relay, by the address of its gRPC port."""
        self._lease, self._view, self._elections = lease, lease.view, elections
        self._relay = relay
        self._models, self._drafts, self._claims = models, drafts, claims
        self._dial = dial
        self._failures = FailureLog(log)
        self._attended: set[str] = set()  # models with a task of `_attend_to` under way
        self._settled: dict[str, Epoch] = {}
        self._recorded_here: set[tuple[str, str, int]] = set()  # (store, model, version), as long as they are shown
        self._lost_since: dict[tuple[str, int], float] = {}
        self._unused_since: dict[str, float] = {}

    async def run(self) -> None:
        """Stands in elections; beside them settles what earlier masters left, and records what was lost."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(RETRY_S / 2)
                with self._failures.contained("the registry lacks versions that are held here"):
                    await self._adopt_versions()
                won: list[str] = []
                with self._failures.contained("this relay stands in no election"):
                    won = await self._elections.stand(self._newest_holders(), time.monotonic())
                for model in sorted({*won, *self._mastered()} - self._attended):
                    self._attended.add(model)
                    group.create_task(self._attend_to(model))

    async def _attend_to(self, model: str) -> None:
        """One round. Whatever fails costs this model alone, until the next round: no error leaves the task."""
        try:
            with self._failures.contained(f"as master of {model} this relay leaves something undone"):
                await self._do_duties(model)
        finally:
            self._attended.discard(model)

    async def _do_duties(self, model: str) -> None:
        try:
            await self.settle(model)  # again, when an answer was lost in the election or in settling
            await self._record_ends(model)
            await self._record_loss(model)
            await self._prune(model)
            await self._end_unused(model)
        except StaleEpoch as error:
            log.info("%s", error)

    async def locate(self, model: str, *, begins: bool = True) -> str:
        """The name of the model's master. Without one, this relay campaigns if it may, else makes the others do so.

        `begins`: for a caller that may begin a model; for another it is UnknownModel where there is none of the name.
        """
        check_model_name(model)
        view = self._view
        if not begins and model not in view.models:
            raise self.unknown(model, f"only a caller with the role {access.PUBLISH.needs} begins one")
        deadline = time.monotonic() + LOCATE_S
        if model not in view.models and len(view.models) >= MODELS_MAX:
            raise OutOfCapacity(
                f"{model} would be more than {MODELS_MAX} models", hint="drop one: `paramserver drop --model NAME`"
            )
        while model not in view.masters:
            if time.monotonic() > deadline:
                blocked = view.without_master().get(model)
                raise Unavailable(
                    f"no relay became master of {model} in {LOCATE_S:g} s{f': {blocked}' if blocked else ''}",
                    hint="see `paramserver status`",
                )
            if not begins:  # known, and so without a master for a moment alone
                await asyncio.sleep(LOCATE_POLL_S)
                continue
            try:
                campaigns = self._lease.member.publish_host and model not in view.models
                if campaigns and await self._elections.campaign(model):
                    await self.settle(model)
                    continue
                await self._elections.want(model)
            except Unavailable:  # busy for a moment, or away: a trainer's first publish would end with it
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(LOCATE_POLL_S)
        return view.masters[model].master.name

    def unknown(self, model: str, why: str = "") -> UnknownModel:
        known = ", ".join(sorted(self._view.models)) or "none"
        return UnknownModel(f"no model {model!r} here", hint=f"known: {known}{f'; {why}' if why else ''}")

    async def settle(self, model: str) -> None:
        """Ends what an earlier master announced and never sealed, after reading the registry anew; once in each epoch.

        The earlier master may still be alive, with a sealing transaction on its way. Both transactions are guarded: the
        seal by the old election's revision, which is over, and by the absence of an end; the end here by the absence of
        a seal. So exactly one of them holds, whichever etcd applies first. The view is read anew before, for the watch
        may lag behind a seal that was written just before the election.
        """
        epoch = self._elections.epoch(model)
        if epoch is not None and self._settled.get(model) == epoch:
            return
        await self._relay.refresh()
        epoch = self._elections.epoch(model)
        if epoch is None:
            return
        for version, state in self._models.of(model).items():
            if state.announced is None or state.sealed is not None or state.ended is not None:
                continue
            begun = state.announced.manifest.epoch
            # What another store's master announced may have been sealed there, where nobody can look any more.
            if begun.store_id == epoch.store_id and begun != epoch:
                await end_version(
                    self._elections, model, version, epoch, Ended("aborted", "its master died before it was sealed")
                )
        self._settled[model] = epoch

    async def _record_ends(self, model: str) -> None:
        """Ends in the registry what this relay gave up while that was away, or while this relay had no lease.

        Nobody else would: for the others the version goes on, and with it their fetches and its tickets.
        """
        epoch, view = self._elections.epoch(model), self._view
        for version, state in self._models.of(model).items():
            if epoch is None or state.ended is None or view.knows(keys.version_key(model, version, "ended")):
                continue
            if view.knows(keys.version_key(model, version, "announced")):
                await end_version(self._elections, model, version, epoch, state.ended)

    async def _record_loss(self, model: str) -> None:
        """Records that the newest sealed version has had no holder for a while; older ones retire by design."""
        newest = self._models.of(model).newest_sealed
        if newest is None:
            return
        if not self._has_no_holder(model, newest):
            self._lost_since.pop((model, newest), None)
            return
        since = self._lost_since.setdefault((model, newest), time.monotonic())
        if time.monotonic() - since <= LOST_GRACE_S:
            return
        what = f"{model} version {newest} has no holder in the registry and is not recorded as lost"
        with self._failures.contained(what):
            # A holder whose lease lapsed in an outage of the registry has the bytes, and no key that shows it.
            if may_hold := await self._possible_holders(model, newest):
                self._lost_since[model, newest] = time.monotonic()  # queried again after another while
                raise Unavailable("; ".join(may_hold))
        epoch = self._elections.epoch(model)
        if not self._failures.is_failing(what) and epoch is not None and self._has_no_holder(model, newest):
            await end_version(self._elections, model, newest, epoch, Ended("lost", "no verified holder is left"))

    def _has_no_holder(self, model: str, version: int) -> bool:
        """Whether no relay is known to hold the version, in memory or on disk."""
        state = self._models.of(model).get(version)
        return state is not None and not (state.holders or state.spilled or state.stage in ("complete", "shown"))

    async def _possible_holders(self, model: str, version: int) -> list[str]:
        """Live relays that hold the version or do not answer, each in words; empty: none can have it."""
        members = [m for name, m in self._view.members.items() if name != self._lease.member.name]
        answers = await asyncio.gather(*(self._query(member, model, version) for member in members))
        return sorted(filter(None, answers))

    async def _query(self, member: Member, model: str, version: int) -> str:
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
        versions = self._models.of(model)
        epoch = self._elections.epoch(model)
        old = versions.forgettable(VERSIONS_KEPT, self._view.pinned_versions(model))
        if epoch is None or not old:
            return
        writes = [Delete(keys.version_key(model, v, what)) for v in old for what in ("announced", "sealed", "ended")]
        for part in parts(writes):
            if not await self._elections.as_master(epoch, model, [], part):
                return
        versions.forget(old)  # only now: records of a version that is forgotten here are deleted by nobody

    # ---- leaving, and joining another registry

    async def resign(self, model: str) -> bool:
        """Leaves the model to the next election; False while a version of it is being written or sealed."""
        epoch = self._elections.epoch(model)
        busy = self._drafts.busy(model)
        if epoch is None or busy:
            return not busy
        await self._elections.as_master(epoch, model, [], [Delete(keys.master_key(model))])
        return True

    async def drop(self, model: str) -> list[int]:
        """Ends a model with all its versions; the numbers of those that this relay held.

        Conflict while somebody publishes to it; StaleEpoch when this relay is not its master.
        """
        if claims := self._claims.of(model):
            raise Conflict(
                f"{claims[0].publisher} publishes to {model} (run {claims[0].run})",
                hint="end that run first, then drop the model",
            )
        if self._drafts.busy(model):
            raise Conflict(f"a version of {model} is being sealed", hint="try again in a moment")
        self._claims.forget(model)
        return await self._drop(model)

    async def _drop(self, model: str) -> list[int]:
        versions, epoch = self._models.of(model), self._elections.epoch(model)
        if epoch is None:
            raise StaleEpoch(f"{self._lease.member.name} is not master of {model}")
        held, number = [record.version for record in versions.shown()], versions.next_number
        master = keys.master_key(model)
        # The record that the versions below `number` were dropped comes first: a relay that sees no more than that
        # gives them up all the same. The election comes last, since it guards every step.
        steps: list[list[Write]] = [[Put(keys.dropped_key(model), str(number).encode())]] if number > 1 else []
        steps += parts([Delete(key) for key in self._view.keys_of(model) if key != master])
        steps.append([Delete(master)])
        for step in steps:
            if not await self._elections.as_master(epoch, model, [], step):
                raise StaleEpoch(f"another relay became master of {model} while it was dropped", hint="drop it again")
        log.info("%s was dropped, with %s", model, f"versions {held}" if held else "no version")
        await self._relay.refresh()
        return held

    async def _end_unused(self, model: str) -> None:
        """Drops a model whose master was located and to which nobody published: such names must not add up."""
        if not self._models.of(model).empty or self._claims.of(model):
            self._unused_since.pop(model, None)
            return
        if time.monotonic() - self._unused_since.setdefault(model, time.monotonic()) > UNUSED_S:
            del self._unused_since[model]
            await self._drop(model)

    async def _adopt_versions(self) -> None:
        """Records sealed versions that are held here and that this registry lacks: it replaced the one before, or was
        restored from a backup.

        Each relay does so, not the master alone: it may hold a version that the master does not. Each version once:
        what the master deletes later stays deleted.
        """
        store_id = self._view.store_id
        shown = {
            (store_id, model, record.version): record
            for model, versions in self._models.items()
            for record in versions.shown()
        }
        self._recorded_here &= shown.keys()
        for name in sorted(shown.keys() - self._recorded_here):
            _, model, version = name
            versions = self._models.of(model)
            state = versions.get(version)
            if state is None or state.announced is None or self._is_recorded(model, version):
                continue
            is_past = len([newer for newer, _ in versions.items() if newer > version]) >= VERSIONS_KEPT  # and pruned
            if is_past and state.announced.manifest.epoch.store_id == store_id:
                continue
            if await self._lease.record_version(model, state.announced, shown[name]):
                self._recorded_here.add(name)

    def _is_recorded(self, model: str, version: int) -> bool:
        return self._view.knows(keys.version_key(model, version, "sealed"))

    def _newest_holders(self) -> dict[str, set[str]]:
        """The holders of the newest sealed version, of each model without a master."""
        found = {}
        for model, versions in self._models.items():
            if model in self._view.masters:
                continue
            newest = versions.newest_sealed
            state = versions.get(newest) if newest is not None else None
            found[model] = set(state.holders) if state is not None else set()
        return found

    def _mastered(self) -> list[str]:
        return sorted(model for model in self._view.masters if self._elections.is_master(model))
