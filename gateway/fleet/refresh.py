"""Refreshes: an engine leaves one version for another.

Invariants:
- the order is acquire, fence, load, verify, label, unfence, release, probe; a load counts only if its pin was held to
  the end;
- on any error after the fence the engine stays fenced: it may hold half a version, or compute nothing of use;
- whatever goes wrong in a load is that engine's state: it never stays `refreshing`, and is tried again;
- turns are asked to leave before the load; one that has not left in time is cut by it, and resumes like any other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gateway.core.fleet import EngineState
from gateway.core.refresh import RefreshDecision, load_failed
from gateway.core.types import TurnId, Version
from gateway.engines.base import EngineFailed, SnapshotRefused
from gateway.fleet.evidence import VersionEvidence
from gateway.fleet.handle import EngineHandle
from gateway.fleet.load_reports import LoadReports
from gateway.fleet.probe import Finding, compare, probe
from gateway.fleet.relays import Relays
from gateway.runtime.standing import own
from paramserver.client import Lease, RelayClient
from protos.errors import LaminarError, NotFound, VersionLost

log = logging.getLogger(__name__)

LEASE_TTL_S = 60.0
RETRY_S = 1.0
RETRY_MAX_S = 30.0
INTERRUPT_MAX_S = 2.0
"""For turns to leave an engine that is to load: they are only cancelled, so milliseconds are usual."""


class _NotAcquired(Exception):
    """An older version could not be acquired: nothing was done to the engine. `gone`: the relay holds it no more."""

    def __init__(self, error: LaminarError) -> None:
        super().__init__(str(error))
        self.gone = isinstance(error, NotFound | VersionLost)


class Refresher:
    """`interrupt` asks a turn to leave its engine; `changed` is called when a refresh has ended."""

    def __init__(
        self,
        model: str,
        relays: Relays,
        vouching: VersionEvidence,
        *,
        interrupt: Callable[[TurnId], object],
        changed: Callable[[], None],
        probes: bool,
    ) -> None:
        self.refreshes = 0
        self.failures = 0
        self.unchanged = 0  # loads of another version after which an engine computed exactly what it did before
        self._probes = probes
        self._model, self._relays, self._vouching = model, relays, vouching
        self._reports = LoadReports(model, relays)
        self._interrupt, self._changed = interrupt, changed

    async def refresh(self, member: EngineHandle, decision: RefreshDecision) -> None:
        state, before = member.state, member.state.version
        started = time.monotonic()
        try:
            version, fenced_s, finding = await own(self._refresh(member, decision))
        except _NotAcquired as e:
            self._not_reloaded(member, decision, e)
            return
        except LaminarError as e:
            self._failed(member, decision, e)
            return
        except Exception as e:
            log.exception("the load of version %d into engine %s failed", decision.to_version, state.name)
            self._failed(member, decision, EngineFailed(f"its load failed as nobody foresaw: {e!r}"))
            return
        state.loaded(version)
        member.refresh_failures = 0
        self.refreshes += 1
        member.timeline.add(
            "refresh",
            engine=state.name,
            from_version=before,
            to_version=version,
            seconds=time.monotonic() - started,
            pause_s=fenced_s,
            probe=finding,
            reason=decision.reason,
        )
        if state.status == "refreshing":
            member.to("serving", f"version {version}")
            if state.newer:
                state.close_intake(time.monotonic())  # it is there for those who insist on it
            else:
                state.open_intake(time.monotonic())
        self._changed()

    async def _refresh(self, member: EngineHandle, decision: RefreshDecision) -> tuple[Version, float, Finding]:
        """What was loaded, how long the engine was fenced for it, and whether it computes otherwise now."""
        await self._make_leave(member, decision)
        if decision.served:
            await self._vouching.prove(member.state.name)
            if member.probe is None:
                await self._probe(member, member.state.version)
        version, fenced_s = await self._load(member, decision)
        async with self._reports.refusing(member, version):
            finding = await self._probe(member, version)
        await self._reports.loaded(member, version)
        return version, fenced_s, finding

    async def _probe(self, member: EngineHandle, version: Version) -> Finding:
        if not self._probes:
            return "none"
        before = member.probe
        member.probe = await probe(member.adapter, member.state.incarnation, version)
        finding = compare(before, member.probe)
        if finding == "same":
            self.unchanged += 1
            log.warning("engine %s computes with version %d exactly what it did before", member.spec.name, version)
        return finding

    async def _make_leave(self, member: EngineHandle, decision: RefreshDecision) -> None:
        for turn_id in decision.interrupted:
            self._interrupt(turn_id)
        try:
            async with asyncio.timeout(INTERRUPT_MAX_S):
                while member.state.turns:
                    member.left.clear()
                    await member.left.wait()
        except TimeoutError:
            log.warning("engine %s loads with %d turns on it", member.spec.name, len(member.state.turns))

    async def _load(self, member: EngineHandle, decision: RefreshDecision) -> tuple[Version, float]:
        assert member.spec.relay is not None
        relay = self._relays.client(member.spec.relay)
        lease = await self._acquire(relay, member.state, decision)
        renewing = asyncio.create_task(_keep(relay, lease), name=f"renew-{member.spec.name}")
        try:
            async with self._reports.refusing(member, Version(lease.version)):
                fenced_s = await member.adapter.load(lease.path, lease.version, lease.root_digest)
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            await relay.release(lease)  # a pin that lapsed raises: then the load does not count
        return Version(lease.version), fenced_s

    async def _acquire(self, relay: RelayClient, state: EngineState, decision: RefreshDecision) -> Lease:
        """What was decided; the newest, which may be newer by now, unless it was an older one."""
        holder = f"gateway/{state.name}"
        if decision.again:
            try:
                return await relay.acquire(self._model, decision.to_version, holder=holder, ttl_s=LEASE_TTL_S)
            except LaminarError as e:
                raise _NotAcquired(e) from e
        wanted = await self._before(relay, state, decision.to_version) if decision.before else None
        return await relay.acquire(self._model, wanted, holder=holder, ttl_s=LEASE_TTL_S)

    async def _before(self, relay: RelayClient, state: EngineState, version: Version) -> int:
        found = state.before(version, [v.version for v in await relay.versions(self._model)])
        if found is None:
            raise NotFound(
                f"{relay.address} holds nothing before version {version}", hint="publish a version that loads"
            )
        return found

    def _not_reloaded(self, member: EngineHandle, decision: RefreshDecision, error: _NotAcquired) -> None:
        """Nothing was done to the engine: it serves on."""
        if error.gone and member.spec.relay is not None:
            self._relays.gone(member.spec.relay, decision.to_version)
        member.state.refresh_not_before = time.monotonic() + RETRY_S
        log.warning("version %d cannot be loaded again: %s", decision.to_version, error)
        if member.state.status == "refreshing":
            member.to("serving", f"version {member.state.version}; {decision.to_version} was not to be had")
            member.state.open_intake(time.monotonic())
        self._changed()

    def _failed(self, member: EngineHandle, decision: RefreshDecision, error: LaminarError) -> None:
        if member.state.tried != decision.to_version:
            member.refresh_failures = 0
        member.refresh_failures += 1
        self.failures += 1
        wait_s = min(RETRY_MAX_S, RETRY_S * 2 ** (member.refresh_failures - 1))
        state = member.state
        load_failed(state, decision, str(error), by_engine=isinstance(error, EngineFailed))
        state.refresh_not_before = time.monotonic() + wait_s
        untouched = isinstance(error, SnapshotRefused) and decision.served
        what = f"goes on with version {state.version}" if untouched else "stays fenced"
        log.warning("engine %s %s, next try in %.0f s: %s", state.name, what, wait_s, error)
        if state.status == "refreshing":
            member.to("serving" if untouched else "fenced", str(error))
        member.look.set()
        self._changed()


async def _keep(relay: RelayClient, lease: Lease) -> None:
    while True:
        await asyncio.sleep(lease.ttl_s / 3)
        await relay.renew(lease)
