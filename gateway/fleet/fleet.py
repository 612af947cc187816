"""The fleet: its engines, and the places that turns have on them. The shell around `core.fleet`, assembled here.

Owner of the machine: everything runs on one event loop, and the state changes only between awaits.
- `watcher` polls engines, `refresh` loads versions into them, `places` assigns turns to them, `pins` keeps versions on
  relays, `evidence` verifies which version an engine ran;
- what happens is sent to the machine (`send`), and its effects are carried out here. Soon after an event that changes
  an input of a decision, one round decides for all of them: intakes, refreshes, and then the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.config import EngineSpec, GatewayConfig
from gateway.core.faults import soonest_s
from gateway.core.fleet.events import (
    Added,
    ConnectionBroke,
    Effect,
    Emptied,
    Event,
    HoldBegan,
    Noted,
    PollMissed,
    PollWanted,
    RelayReported,
    Removed,
    RoundBegan,
    TurnFailed,
    VersionCame,
)
from gateway.core.fleet.intake import IntakeChange
from gateway.core.fleet.machine import FleetMachine
from gateway.core.fleet.refresh import RefreshDecision
from gateway.core.fleet.state import EngineState
from gateway.core.placing.reasons import closed_reason
from gateway.core.placing.scheduler import Admission
from gateway.core.types import NO_VERSION, EngineName, TurnId, Version
from gateway.engines.base import AdapterContext, CutReason, EngineFailed, StreamCut, engine_tls
from gateway.engines.kinds import connect
from gateway.fleet.announcements import Announcements
from gateway.fleet.claims import START_PATIENCE_S, ClaimStore, EngineClaims
from gateway.fleet.evidence import VersionEvidence
from gateway.fleet.handle import EngineHandle
from gateway.fleet.pins import VersionPins
from gateway.fleet.places import Places
from gateway.fleet.refresh import Refresher
from gateway.fleet.relays import Relays
from gateway.fleet.watcher import EngineWatcher
from gateway.runtime.supervisor import Supervisor
from gateway.store import Timeline
from gateway.store.lineage import LineageStore
from protos.access.credentials import credentials_in
from protos.engines import check_relay
from protos.errors import Conflict, NotFound, Unavailable
from protos.telemetry.logs import about
from protos.telemetry.spans import Tracer

log = logging.getLogger(__name__)

ELSEWHERE_MAX = 64  # engines that are not in the fleet, of which the status has a line
TICK_S = 0.5
"""How late the expiry of an age or of a hold may be noticed."""
FAULTS: frozenset[CutReason] = frozenset({"protocol", "server_error", "early_end"})
"""Cuts for which an engine is to blame: see `TurnFailed`."""


@dataclass(frozen=True, slots=True)
class FleetStatistics:
    refreshes: int
    refresh_failures: int
    last_refresh_failure_unix_s: float
    refreshes_unchanged: int
    queued: int
    waiting_for: Mapping[str, int]


class Fleet:
    """`async with Fleet(...)`. `places` assigns turns to engines; `handles` has what is needed to call an engine.
    `adapters`: what each engine's adapter is made with; `context_tokens`: the model's, for engines that report none."""

    def __init__(
        self,
        config: GatewayConfig,
        machine: FleetMachine,
        timeline: Timeline,
        admission: Callable[[], Admission],
        adapters: AdapterContext,
        lineage: LineageStore | None = None,
        context_tokens: int = 0,
        tracer: Tracer | None = None,
        claims: ClaimStore | None = None,
    ) -> None:
        self.config = config
        self.claims = EngineClaims(claims, self._claimed_by_another)
        self.elsewhere: dict[str, str] = {}
        """Registered and lost engines that are not in the fleet, since another gateway has them or their relay is gone:
        why, by their names; the last ELSEWHERE_MAX."""
        self.lost = set[str]()
        """Names of engines that left since another gateway claimed them; whoever added them may try again."""
        self.machine, self.state = machine, machine.state
        self.handles: dict[EngineName, EngineHandle] = {}
        self.version_available = asyncio.Event()  # some engine could load a newer version: wakes the repack loop
        self.evidence = VersionEvidence(self.handles)
        self.places = Places(self.state, admission, self, queue_max=config.queue_max)
        credentials = credentials_in(config.credentials)
        self._adapters = adapters = replace(adapters, tls=engine_tls(credentials))
        self._timeline = timeline
        self._deciding: asyncio.Handle | None = None  # a round of decisions is scheduled
        self._tasks = Supervisor()
        self.relays = Relays(
            config.model,
            self._tasks,
            self._version_available,
            lineage=lineage.lineage if lineage else None,
            saw=lineage.keep if lineage else lambda: None,
            credentials=credentials,
        )
        self.announcements = Announcements(self.relays, lambda: machine.state.newest)
        self.pins = VersionPins(config.model, self.state, self.relays, timeline)
        self._watcher = EngineWatcher(config, self.send, adapters.tokenizer, context_tokens, adapters.tls)
        self._refresher = Refresher(
            config.model,
            self.relays,
            self.evidence,
            interrupt=self.places.interrupt,
            send=self.send,
            timeline=timeline,
            probes=config.probe,
            tracer=tracer,
        )

    async def __aenter__(self) -> Fleet:
        self._loops = [
            self._tasks.keep_running(self._tick, "fleet-tick"),
            self._tasks.keep_running(self.pins.run, "version-pins"),
            self._tasks.keep_running(self.claims.run, "engine-claims"),
        ]
        try:
            await self.claims.begin(START_PATIENCE_S)
            for spec in self.config.engines:
                if spec.relay is None and spec.loads:
                    spec = replace(spec, relay=self.config.relay)
                await self.join(spec, START_PATIENCE_S)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Stops polling, fails every turn that waits for a place, and closes every connection."""
        self.places.close()
        for task in self._loops:
            task.cancel()
        for name in list(self.handles):
            await self.remove(name)
        if self._deciding is not None:
            self._deciding.cancel()
        await self._tasks.close()
        await self.claims.close()

    # -- engines

    async def join(self, spec: EngineSpec, patience_s: float = 0.0) -> None:
        """Claims the engine among the gateways that share a store, and adds it. Raises as `add` does, and Claimed for
        one that another live gateway has, for `patience_s` at least."""
        self._check_spec(spec)
        try:
            await self.claims.take(spec.name, spec.url, patience_s)
            self.add(spec)
        except BaseException:
            self._give_back(spec.url)
            raise
        self.elsewhere.pop(spec.name, None)
        self.lost.discard(spec.name)

    def _give_back(self, url: str) -> None:
        """Others may have the engine, unless it is in the fleet: it may have joined it meanwhile."""
        if not any(handle.spec.url == url for handle in self.handles.values()):
            self.claims.give_back(url)

    def note_elsewhere(self, name: str, why: str) -> None:
        self.elsewhere.pop(name, None)
        self.elsewhere[name] = why
        while len(self.elsewhere) > ELSEWHERE_MAX:
            del self.elsewhere[next(iter(self.elsewhere))]

    async def _claimed_by_another(self, url: str, holder: str) -> None:
        """While the store of claims was away: the engine is that gateway's now."""
        for name, handle in list(self.handles.items()):
            if handle.spec.url == url:
                log.error("engine %s at %s leaves the fleet: %s has claimed it", name, url, holder)
                await self.remove(name)
                self.lost.add(name)
                self.note_elsewhere(name, f"engine {name} at {url} belongs to {holder}")

    def add(self, spec: EngineSpec) -> None:
        """Raises Conflict for a name or an address that is taken, UnsupportedField for a relay that its kind cannot
        load from."""
        name = EngineName(spec.name)
        self._check_spec(spec)
        adapter = connect(spec.kind, spec.url, self._adapters)
        if not spec.loads:
            log.info("engine %s keeps the version that it was started with: kind %s loads no others", name, spec.kind)
        versions: dict[str, Any] = {}
        if spec.relay is not None:
            self.relays.follow(spec.relay)
            newest = self.relays.newest(spec.relay) or NO_VERSION
            versions = {"relay": spec.relay, "loadable": self.relays.held(spec.relay), "available": newest}
        state = EngineState(name, spec.kind, spec.url, loads=spec.loads, **versions)
        self.send(Added(state))
        handle = self.handles[name] = EngineHandle(spec, adapter, state)
        watcher = self._watcher
        handle.watch = self._tasks.keep_running(
            lambda: watcher.watch(handle), f"watch-{name}", lambda error: watcher.failed(handle, error)
        )
        handle.tether = self._tasks.keep_running(lambda: watcher.hold_tether(handle), f"tether-{name}")

    def _check_spec(self, spec: EngineSpec) -> None:
        check_relay(spec.kind, spec.relay, f"engine {spec.name}")
        if spec.name in self.handles:
            raise Conflict(
                f"there is already an engine named {spec.name!r}", hint=f"taken: {', '.join(sorted(self.handles))}"
            )
        for name, handle in self.handles.items():
            if handle.spec.url.rstrip("/") == spec.url.rstrip("/"):
                raise Conflict(f"{spec.url} is engine {name!r} already", hint="an engine counts once")

    async def check(self, spec: EngineSpec) -> None:
        """Requests the engine's report without adding it. Raises as `add` does, and Unavailable if it does not respond
        or cannot be used."""
        self._check_spec(spec)
        adapter = connect(spec.kind, spec.url, self._adapters)
        try:
            await adapter.report()
            await adapter.limits()
        except EngineFailed as e:
            raise Unavailable(
                f"engine {spec.name} cannot be used: {e.outline}",
                hint=e.hint or 'start it first, or send "check": false to add it before it responds',
            ) from e
        finally:
            await adapter.close()

    async def remove(self, name: EngineName) -> None:
        """Removes an engine at once; its turns are cut and go on elsewhere. NotFound for an unknown name."""
        handle = self.handles.pop(name, None)
        if handle is None:
            raise NotFound(f"no engine named {name!r}", hint=f"there are: {', '.join(sorted(self.handles)) or 'none'}")
        self.send(Removed(name))
        try:
            await handle.close()
            self._give_back(handle.spec.url)
        finally:
            relay = handle.spec.relay
            if relay is not None and not any(other.spec.relay == relay for other in self.handles.values()):
                await self.relays.unfollow(relay)

    async def polled(self) -> None:
        """Returns once every engine was polled; each poll has its deadline."""
        for handle in list(self.handles.values()):
            await handle.polled.wait()

    def suspect(self, engine: EngineName) -> None:
        """A connection to the engine broke: it gets no turn before it responded to another poll, which is made now."""
        self.send(ConnectionBroke(engine))

    def failed(self, engine: EngineName, turn_id: TurnId, cut: StreamCut) -> None:
        """A turn was cut there."""
        self.send(TurnFailed(engine, turn_id, str(cut), cut.reason in FAULTS))

    def out_s(self) -> float:
        """Until an engine takes turns on which not turn after turn failed; 0 if there is one, or may be."""
        faults = [engine.faults for engine in self.state.engines.values() if engine.status != "dead"]
        return soonest_s(faults, time.monotonic())

    @property
    def context_tokens(self) -> int:
        """The largest context that an engine reported, dead engines included, since they may come back. A turn is
        placed only where all of it fits."""
        return max((engine.context_tokens for engine in list(self.state.engines.values())), default=0)

    # -- what follows from a change

    def send(self, event: Event) -> None:
        """Takes an event to the machine, and carries out what follows."""
        self._carry_out(self.machine.handle(event, time.monotonic()))
        if self.machine.changed:
            self.decide_soon()

    def decide_soon(self) -> None:
        """Schedules one round for all that happens in one round of the event loop.

        It looks at the whole queue. When engines load under a thousand turns, all of them leave and wait again:
        deciding for each of them took nearly two seconds of a core, in which no engine could begin to load.
        """
        if self._deciding is None:
            self._deciding = asyncio.get_running_loop().call_soon(self._decide)

    def reconcile(self) -> None:
        """Decides at once, for every engine: opens and closes intakes, starts refreshes, and serves the queue."""
        self._decide(everything=True)

    def _decide(self, *, everything: bool = False) -> None:
        if self._deciding is not None:
            self._deciding.cancel()
            self._deciding = None
        self.send(RoundBegan(self.places.wanted(), self.places.waiting_since(), everything))
        self.places.serve()

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Noted():
                    self._note(effect)
                case IntakeChange(engine, opens, reason):
                    state = "intake open" if opens else "intake closed"
                    self._timeline.add("engine", engine=engine, state=state, reason=reason)
                case RefreshDecision():
                    handle = self.handles[effect.engine]
                    refresh = self._refresher.refresh(handle, effect)
                    handle.refresh = self._tasks.start(refresh, f"refresh-{effect.engine}")
                case PollWanted(engine, after_s):
                    self._poll_again(self.handles[engine].poll_now, after_s)
                case PollMissed(engine, error):
                    self._timeline.add("look", engine=engine, error=error)
                case HoldBegan(engine):
                    self._log_hold(self.state.engines[engine])
                case Emptied(engine):
                    self.handles[engine].emptied.set()
                case VersionCame():
                    self.version_available.set()

    def _note(self, noted: Noted) -> None:
        if noted.state:
            self._timeline.add("engine", engine=noted.engine, state=noted.state, reason=noted.reason)
        if noted.text:
            version = self.state.engines[noted.engine].version if noted.version is None else noted.version
            extra = about(engine=noted.engine, version=version)
            level = logging.WARNING if noted.warns else logging.INFO
            log.log(level, "engine %s%s", noted.engine, noted.text, extra=extra)

    def _poll_again(self, poll_now: asyncio.Event, after_s: float) -> None:
        if after_s:
            asyncio.get_running_loop().call_later(after_s, poll_now.set)
        else:
            poll_now.set()

    def _log_hold(self, engine: EngineState) -> None:
        reason = closed_reason(self.state, engine, time.monotonic())
        log.info("engine %s %s; %d turns wait", engine.name, reason, self.places.queued)
        self._timeline.add("engine", engine=engine.name, state="held", reason=reason)

    def _version_available(self, address: str, version: Version) -> None:
        """A relay responded for the first time, or what it holds has changed. `version`: the one that came; 0: none."""
        if version:
            self._timeline.add("version", version=version, relay=address)
        self.send(RelayReported(address, version, self.relays.held(address)))
        self.announcements.changed()

    async def _tick(self) -> None:
        """Ages and holds expire by the clock, without any event."""
        while True:
            await asyncio.sleep(TICK_S)
            self.reconcile()

    def statistics(self) -> FleetStatistics:
        return FleetStatistics(
            self._refresher.refreshes,
            self._refresher.failures,
            self._refresher.last_failure_unix_s,
            self._refresher.unchanged,
            self.places.queued,
            self.places.reasons(),
        )
