"""Operator commands of a running relay: drain it before it is stopped, adopt a replaced registry, drop a model.

Invariants:
- a draining relay goes on serving what it has; it is done when nobody needs it for anything;
- adopting brings sealed versions along as they are: their roots, numbers and bytes do not change;
- no number is given twice across registries: who adopts may have been cut off while others went on.
"""

from __future__ import annotations

import logging
import re

from paramserver.client.relay import RelayClient
from paramserver.core.records import NUMBER_MAX, check_model_name
from paramserver.daemon.parts import RelayParts
from paramserver.relay.recovery import NUMBERS_SKIPPED
from protos.errors import Conflict, InvalidRequest, Unavailable

log = logging.getLogger(__name__)

_STORE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Operations:
    """The commands of one relay; on its event loop."""

    def __init__(self, parts: RelayParts) -> None:
        self._name, self._lease, self._view = parts.config.name, parts.lease, parts.lease.view
        self._elections, self._duties, self._credentials = parts.elections, parts.duties, parts.credentials
        self._relay, self._reconciler = parts.relay, parts.reconciler
        self._models, self._pins, self._store = parts.models, parts.pins, parts.store

    async def drain(self) -> list[str]:
        """Begins or goes on to drain; what the relay is still needed for, in words."""
        if not self._lease.member.draining:
            log.info("draining: no new version, no chain, no election")
        await self._lease.drain()
        for model in self._mastered():
            await self._duties.resign(model)
        mastered = [f"master of {model}" for model in self._mastered()]
        return [*mastered, *self._only_here(), *self._in_use()]

    def _mastered(self) -> list[str]:
        return [model for model in sorted(self._view.masters) if self._elections.is_master(model)]

    def _only_here(self) -> list[str]:
        """The newest sealed version of each model must be held by another relay that stays."""
        found = []
        for model, versions in self._models.items():
            newest = versions.newest_sealed
            state = versions.get(newest) if newest is not None else None
            if state is None or state.stage != "shown":
                continue
            others = state.holders & self._view.places().keys() - {self._name}
            if not others and not state.spilled - {self._name}:
                found.append(f"only holder of {model} version {newest}")
        return found

    def _in_use(self) -> list[str]:
        # A pin for the fleet is made elsewhere once this relay is gone: other copies stay meanwhile.
        hard = [pin for pin in self._pins.all() if not pin.copies]
        pins = [f"pin of {pin.holder} on {pin.model} version {pin.version}" for pin in hard]
        links = [f"peers fetching {snapshot}" for snapshot in self._store.snapshots() if snapshot.num_links]
        return [*pins, *links]

    async def continue_store(self, store_id: str, model: str, above: int) -> tuple[str, list[str]]:
        """Records that versions of an earlier registry go on in this one, the next of `model` above `above`.

        For readers and trainers that know the earlier one, when no relay is left that was there.
        """
        if not _STORE_ID.fullmatch(store_id):
            raise InvalidRequest(f"{store_id!r} is no registry's id", hint="give the one that the refusal names")
        if above > NUMBER_MAX:
            raise InvalidRequest(f"above {above}", hint=f"give at most {NUMBER_MAX}: versions count up from there")
        if self._lease.foreign_store:
            raise Conflict(
                "this relay does not belong to the registry that is there now",
                hint="`paramserver adopt` without more first",
            )
        if model:
            check_model_name(model)
            self._models.of(model).skip_to(above + 1)
            await self._elections.want(model)
            await self._elections.skip_numbers(model, above + 1)
        await self._lease.continue_stores([store_id])
        await self._relay.refresh()
        log.info("versions of the registry %s go on in this one (%s)", store_id, self._view.store_id)
        return self._view.store_id, [f"{model} above version {above}"] if model else []

    async def drop(self, model: str) -> list[int]:
        """Ends a model and all its versions, wherever its master is; the numbers of those that the master held."""
        if model not in self._view.models:
            raise self._duties.unknown(model)
        master = await self._duties.locate(model)
        if self._elections.is_master(model):
            return await self._duties.drop(model)
        member = self._view.members.get(master)
        if member is None:
            raise Unavailable(f"{master}, master of {model}, is not a member now", hint="try again")
        async with RelayClient(member.grpc_address, credentials=self._credentials) as peer:
            return await peer.drop(model)

    async def adopt(self) -> tuple[str, list[str]]:
        """Joins the registry that is there now: its id, and the versions that come along.

        A call that failed half-way is made again, and does what is left.
        """
        known = {model: versions.newest_known for model, versions in self._models.items()}
        store_id = await self._lease.adopt()
        for model, newest in known.items():  # before this relay can be elected there
            self._models.of(model).skip_to(newest + NUMBERS_SKIPPED)
            self._drop_unsealed(model)
        for model, newest in known.items():
            await self._elections.skip_numbers(model, newest + NUMBERS_SKIPPED)
        await self._relay.refresh()
        held = []
        for model, versions in self._models.items():
            shown = versions.shown()
            held += [f"{model} version {record.version}" for record in shown]
            if shown:
                await self._elections.want(model)
        self._lease.adopted()
        log.info("adopted the registry %s with %s", store_id, ", ".join(held) or "nothing")
        return store_id, held

    def _drop_unsealed(self, model: str) -> None:
        """Their outcome in the old registry cannot be known any more; whoever holds one sealed brings it along."""
        for version, state in self._models.of(model).items():
            if state.sealed is None:
                self._reconciler.withdraw(model, version, "its registry was replaced before it was sealed")
