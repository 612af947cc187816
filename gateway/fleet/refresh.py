"""Refreshes: an engine leaves one version for another.

Invariants:
- the order is acquire, fence, load, verify, label, unfence, release, probe; a load counts only if its pin was held to
  the end: without the pin, the relay may have recycled the memory while the engine read it;
- a failed load is the state of that engine alone: it never stays `refreshing`, and is retried;
- turns are interrupted before the load; a turn that has not left in time is cut by it, and resumes like any other;
- which engine could not load which version is reported to the relay tier, so that the trainer's ticket shows it. A
  report never fails a refresh, nor delays it for longer than `REPORT_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from gateway.core.fleet.events import Event, Loaded, LoadFailed, NotAcquired
from gateway.core.fleet.refresh import RefreshDecision
from gateway.core.spans import load_span
from gateway.core.types import TurnId, Version
from gateway.engines.base import EngineFailed, SnapshotRefused
from gateway.fleet.evidence import VersionEvidence
from gateway.fleet.handle import EngineHandle
from gateway.fleet.probe import Finding, compare, probe
from gateway.fleet.relays import Relays
from gateway.runtime.clock import unix_s
from gateway.runtime.supervisor import log_failure, rpc_result
from gateway.store import Timeline
from paramserver.client import Lease, RelayClient
from protos.errors import LaminarError, NotFound, VersionLost
from protos.telemetry.context import parse_traceparent
from protos.telemetry.spans import Tracer

log = logging.getLogger(__name__)

LEASE_TTL_S = 60.0
INTERRUPT_MAX_S = 2.0
"""For turns to leave an engine that is to load: they are only cancelled, so milliseconds are usual."""
REPORT_TIMEOUT_S = 2.0
REPORTED_MAX = 16
"""Refused versions of one engine; a relay keeps no more."""


class _NotAcquired(Exception):
    """An older version could not be acquired: nothing was done to the engine. `gone`: the relay does not hold it."""

    def __init__(self, error: LaminarError) -> None:
        super().__init__(str(error))
        self.gone = isinstance(error, NotFound | VersionLost)


class Refresher:
    """`interrupt` makes a turn leave its engine; `send` takes to the machine what came of a load."""

    def __init__(
        self,
        model: str,
        relays: Relays,
        evidence: VersionEvidence,
        *,
        interrupt: Callable[[TurnId], object],
        send: Callable[[Event], None],
        timeline: Timeline,
        probes: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self.refreshes = 0
        self.failures = 0
        self.last_failure_unix_s = 0.0
        self.unchanged = 0  # loads of another version after which an engine computed exactly what it did before
        self._probes = probes
        self._model, self._relays, self._evidence = model, relays, evidence
        self._interrupt, self._send, self._timeline = interrupt, send, timeline

    async def refresh(self, handle: EngineHandle, decision: RefreshDecision) -> None:
        """Carries the decision out. Its failure becomes the engine's state; nothing is raised."""
        state, before = handle.state, handle.state.version
        started = time.monotonic()
        try:
            version, fenced_s, finding = await rpc_result(self._refresh(handle, decision))
        except _NotAcquired as e:
            self._not_reloaded(handle, decision, e)
            return
        except LaminarError as e:
            self._failed(handle, decision, e)
            return
        except Exception as e:
            log.exception("the load of version %d into engine %s failed", decision.to_version, state.name)
            self._failed(handle, decision, EngineFailed(f"its load failed with an unexpected error: {e!r}"))
            return
        self.refreshes += 1
        self._timeline.add(
            "refresh",
            engine=state.name,
            from_version=before,
            to_version=version,
            seconds=time.monotonic() - started,
            pause_s=fenced_s,
            probe=finding,
            reason=decision.reason,
        )
        self._send(Loaded(state.name, version))

    async def _refresh(self, handle: EngineHandle, decision: RefreshDecision) -> tuple[Version, float, Finding]:
        """The version loaded, the seconds for which the engine was fenced, and whether it computes otherwise now."""
        await self._clear(handle, decision)
        if decision.served:
            await self._evidence.check(handle.state.name)
            if handle.probe is None:
                await self._probe(handle, handle.state.version)
        version, fenced_s = await self._load(handle, decision)
        async with self._reporting(handle, version):
            finding = await self._probe(handle, version)
        reported, handle.reported = handle.reported, set()
        if version in reported:  # older versions stay refused: the engine never loaded them
            await self._report(handle, version, "")
        return version, fenced_s, finding

    async def _probe(self, handle: EngineHandle, version: Version) -> Finding:
        if not self._probes:
            return "none"
        before = handle.probe
        handle.probe = await probe(handle.adapter, handle.state.incarnation, version)
        finding = compare(before, handle.probe)
        if finding == "same":
            self.unchanged += 1
            log.warning("engine %s computes with version %d exactly what it did before", handle.spec.name, version)
        return finding

    async def _clear(self, handle: EngineHandle, decision: RefreshDecision) -> None:
        """Interrupts the turns that the decision names, and waits until none runs on the engine."""
        for turn_id in decision.interrupted:
            self._interrupt(turn_id)
        try:
            async with asyncio.timeout(INTERRUPT_MAX_S):
                while handle.state.turns:
                    handle.emptied.clear()
                    await handle.emptied.wait()
        except TimeoutError:
            log.warning("engine %s loads with %d turns on it", handle.spec.name, len(handle.state.turns))

    async def _load(self, handle: EngineHandle, decision: RefreshDecision) -> tuple[Version, float]:
        assert handle.spec.relay is not None
        relay = self._relays.client(handle.spec.relay)
        lease = await self._acquire(relay, handle, decision)
        renewing = asyncio.create_task(relay.keep_pinned(lease), name=f"renew-{handle.spec.name}")
        renewing.add_done_callback(log_failure)  # a pin that lapsed for it is found by `release`
        try:
            async with self._reporting(handle, Version(lease.version)):
                with self._span(handle, lease):
                    fenced_s = await handle.adapter.load(lease.path, lease.version, lease.root_digest)
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            await relay.release(lease)  # a pin that lapsed raises: then the load does not count
        return Version(lease.version), fenced_s

    @contextmanager
    def _span(self, handle: EngineHandle, lease: Lease) -> Iterator[None]:
        """The load in the version's trace, which the lease names if the version has one."""
        trace = None if self._tracer is None else parse_traceparent(lease.traceparent)
        if self._tracer is None or trace is None:
            yield
            return
        started, error = unix_s(), ""
        try:
            yield
        except BaseException as e:
            error = str(e) or type(e).__name__
            raise
        finally:
            span = load_span(
                trace,
                model=lease.model,
                version=lease.version,
                engine=handle.spec.name,
                address=handle.spec.relay or "",
                started_unix_s=started,
                ended_unix_s=unix_s(),
                error=error,
            )
            self._tracer.record(span)

    async def _acquire(self, relay: RelayClient, handle: EngineHandle, decision: RefreshDecision) -> Lease:
        """The version decided on. The newest may be newer by now; a version to go back to is exact."""
        holder = f"gateway/{handle.state.name}"
        if decision.again:
            try:
                return await relay.acquire(self._model, decision.to_version, holder=holder, ttl_s=LEASE_TTL_S)
            except LaminarError as e:
                raise _NotAcquired(e) from e
        wanted = await self._before(relay, handle, decision.to_version) if decision.before else None
        return await relay.acquire(self._model, wanted, holder=holder, ttl_s=LEASE_TTL_S)

    async def _before(self, relay: RelayClient, handle: EngineHandle, version: Version) -> int:
        found = handle.state.before(version, [v.version for v in await relay.versions(self._model)])
        if found is None:
            raise NotFound(
                f"{relay.address} holds nothing before version {version}", hint="publish a version that loads"
            )
        return found

    # -- reports to the relay tier

    @asynccontextmanager
    async def _reporting(self, handle: EngineHandle, version: Version) -> AsyncIterator[None]:
        """An EngineFailed of the body passes on, and is reported: the fault is the engine's or the snapshot's. Other
        errors, such as a relay that is away, are not."""
        try:
            yield
        except EngineFailed as e:
            handle.reported = {version, *sorted(handle.reported)[-REPORTED_MAX:]}
            await self._report(handle, version, str(e))
            raise

    async def _report(self, handle: EngineHandle, version: Version, error: str) -> None:
        """Without an `error` the version was loaded after all."""
        relay, engine = handle.spec.relay, handle.state.name
        assert relay is not None
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await self._relays.client(relay).report_load(self._model, version, engine, error)
        except (LaminarError, TimeoutError) as e:
            why = str(e) or f"no response within {REPORT_TIMEOUT_S:g} s"
            log.warning(
                "the load of version %d on engine %s was not reported to relay %s: %s", version, engine, relay, why
            )

    # -- failures

    def _not_reloaded(self, handle: EngineHandle, decision: RefreshDecision, error: _NotAcquired) -> None:
        """Nothing was done to the engine."""
        if error.gone and handle.spec.relay is not None:
            self._relays.gone(handle.spec.relay, decision.to_version)
        log.warning("version %d cannot be loaded again: %s", decision.to_version, error)
        self._send(NotAcquired(handle.state.name, decision.to_version))

    def _failed(self, handle: EngineHandle, decision: RefreshDecision, error: LaminarError) -> None:
        self.failures += 1
        self.last_failure_unix_s = unix_s()
        untouched = isinstance(error, SnapshotRefused) and decision.served
        by_engine = isinstance(error, EngineFailed)
        self._send(LoadFailed(handle.state.name, decision, str(error), by_engine, untouched))
