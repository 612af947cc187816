"""Elections of masters, and the transactions that hold only while an election does.

Invariants:
- the registry alone decides an election: its transaction creates the master's key, on the winner's lease;
- a master's transaction is guarded by the revision of its election, and by a key of its own store: the registry may be
  replaced by another between two calls, whose revisions start again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import msgspec

from paramserver.core import view as keys
from paramserver.core.election import candidacy
from paramserver.core.records import Epoch, Master
from paramserver.membership.registry import Absent, Created, Guard, Put, Registry, Write
from paramserver.relay.member_lease import MemberLease
from protos.errors import StaleEpoch
from protos.failures import FailureLog

log = logging.getLogger(__name__)


class Elections:
    """The elections of one relay; owned by its event loop."""

    def __init__(self, registry: Registry, lease: MemberLease) -> None:
        self._registry, self._lease, self._view = registry, lease, lease.view
        self._vacant_since: dict[str, float] = {}  # when this relay first saw a model without a master
        self._failures = FailureLog(log)

    def is_master(self, model: str) -> bool:
        seen = self._view.masters.get(model)
        return seen is not None and seen.master.instance == self._lease.member.instance

    def other_master(self, model: str) -> str:
        """The name of another relay that is master of the model; empty when there is none."""
        seen = self._view.masters.get(model)
        return seen.master.name if seen is not None and not self.is_master(model) else ""

    def epoch(self, model: str) -> Epoch | None:
        """The epoch in which this relay is master of the model; None when it is not."""
        return self._view.epoch(model) if self.is_master(model) else None

    def epoch_as_master(self, model: str) -> Epoch:
        """The same; StaleEpoch when this relay is not master."""
        epoch = self.epoch(model)
        if epoch is None:
            other = self.other_master(model)
            raise StaleEpoch(
                f"relay {self._lease.member.name} is not master of {model}",
                hint=f"publish to {other}" if other else "wait for an election",
            )
        return epoch

    def check(self, epoch: Epoch, model: str) -> None:
        """StaleEpoch when the election of that epoch is known to be over."""
        if self.epoch(model) != epoch:
            raise StaleEpoch(f"{self._lease.member.name} is no longer master of {model} in epoch {epoch}")

    async def want(self, model: str) -> None:
        """Makes the model known, so that relays campaign for it."""
        await self._registry.transact([Absent(keys.wanted_key(model))], [Put(keys.wanted_key(model), b"")])

    async def skip_numbers(self, model: str, number: int) -> None:
        """No master gives a number below this one, not even after this relay has died."""
        await self._registry.transact([], [Put(keys.skipped_key(model, self._lease.member.name), str(number).encode())])

    async def stand(self, newest_holders: dict[str, set[str]], now: float) -> list[str]:
        """Campaigns for each known model without a master, when it is this relay's turn. Returns those won."""
        if self._lease.member.draining:
            return []
        won = []
        for model in sorted(self._view.models):
            with self._failures.contained(f"this relay does not stand for master of {model}"):
                if await self._stand(model, newest_holders.get(model, set()), now):
                    won.append(model)
        return won

    async def _stand(self, model: str, newest_holders: Collection[str], now: float) -> bool:
        if model in self._view.masters:
            self._vacant_since.pop(model, None)
            return False
        since = self._vacant_since.setdefault(model, now)
        delay_s, reason = candidacy(self._lease.member.name, list(self._view.members.values()), newest_holders)
        if now - since < delay_s:
            return False
        # A model that was dropped meanwhile must not be made again by its election, and looks masterless until it is
        # forgotten here: the guard is the key that this relay has seen, with the revision at which it was created.
        wanted = self._view.created(keys.wanted_key(model))
        if wanted is None or not await self.campaign(model, [Created(keys.wanted_key(model), wanted)]):
            return False
        log.info("elected master of %s (%s)", model, reason)
        return True

    async def campaign(self, model: str, guards: Sequence[Guard] = ()) -> bool:
        """Tries to become master at once, and makes the model known. False when somebody else is, or a guard failed."""
        master = Master(self._lease.member.name, self._lease.member.instance)
        key = keys.master_key(model)
        # Guarded by this relay's own registration: a lease that expired meanwhile may have given its name to another.
        outcome = await self._registry.transact(
            [Absent(key), Created(keys.member_key(self._lease.member.name), await self._member_revision()), *guards],
            [Put(key, msgspec.json.encode(master), self._lease.lease_id), Put(keys.wanted_key(model), b"")],
        )
        return outcome.succeeded

    async def _member_revision(self) -> int:
        state = await self._registry.list(keys.member_key(self._lease.member.name))
        mine = [e for e in state.entries if e.key == keys.member_key(self._lease.member.name)]
        return mine[0].created if mine else -1

    async def as_master(self, epoch: Epoch, model: str, guards: Sequence[Guard], writes: Sequence[Write]) -> bool:
        """A transaction that holds only while this relay's election does. False when a guard failed.

        Raises Unavailable when the outcome is in doubt, StaleEpoch when the election is known to be over.
        """
        self.check(epoch, model)
        fence = Created(keys.master_key(model), epoch.revision)
        outcome = await self._registry.transact([self._lease.store_guard, fence, *guards], writes)
        return outcome.succeeded
