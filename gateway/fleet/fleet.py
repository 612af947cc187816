"""The fleet: its engines, and the places that turns have on them. The shell around `core.fleet`, assembled here.

Owner of `FleetState`: everything runs on one event loop, and state changes only between awaits.
- `watcher` looks at engines, `refresh` loads versions into them, `places` gives turns places on them;
- whatever changes what may be decided calls `changed`, where intakes, refreshes and the queue are decided anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.config import EngineSpec, GatewayConfig
from gateway.core.event_size import mean_pace
from gateway.core.fleet import EngineState, FleetState, TurnLoad
from gateway.core.intake import intake_changes
from gateway.core.reasons import closed_reason
from gateway.core.refresh import refresh_decisions
from gateway.core.scheduler import Admission, Demand, Placement
from gateway.core.text_requests import TextDemand
from gateway.core.types import NO_VERSION, EngineName, TurnId, Version
from gateway.engines.base import EngineFailed
from gateway.engines.kinds import connect
from gateway.fleet.evidence import VersionEvidence
from gateway.fleet.handle import EngineHandle
from gateway.fleet.pins import VersionPins
from gateway.fleet.places import Occupant, Places
from gateway.fleet.refresh import Refresher
from gateway.fleet.relays import Relays
from gateway.fleet.watcher import EngineWatcher, Tokenize
from gateway.runtime.standing import StandingTasks
from gateway.store import Timeline
from gateway.store.lineage import LineageStore
from protos.errors import Conflict, NotFound, Unavailable

log = logging.getLogger(__name__)

TICK_S = 0.5
"""How late an age or a hold that runs out by the clock may be noticed."""


@dataclass(frozen=True, slots=True)
class FleetStatistics:
    refreshes: int
    refresh_failures: int
    refreshes_unchanged: int
    queued: int
    waiting_for: Mapping[str, int]


class Fleet:
    """`async with Fleet(...)`. `place` and `leave` frame every turn's stay on an engine."""

    def __init__(
        self,
        config: GatewayConfig,
        state: FleetState,
        timeline: Timeline,
        admission: Callable[[], Admission],
        lineage: LineageStore | None = None,
        tokenize: Tokenize | None = None,
    ) -> None:
        self._lineage = lineage
        self.config = config
        self._tokenize = tokenize
        self.state = state
        self.members: dict[EngineName, EngineHandle] = {}
        self.version_available = asyncio.Event()  # some engine could load a newer version: wakes the repack loop
        self.vouching = VersionEvidence(self.members)
        self.relays: Relays
        self.pinning: VersionPins
        self._timeline = timeline
        self._places = Places(self.state, admission, self, queue_max=config.queue_max)
        self._watching: EngineWatcher
        self._refreshing: Refresher
        self._changing: asyncio.Handle | None = None  # `changed` is due in this round of the event loop
        self._tasks = StandingTasks()

    async def __aenter__(self) -> Fleet:
        kept = self._lineage
        self.relays = Relays(
            self.config.model,
            self._tasks,
            self._available,
            lineage=kept.lineage if kept else None,
            saw=kept.keep if kept else lambda: None,
        )
        self.pinning = VersionPins(
            self.config.model, self.state.kept, self.relays, self._timeline, self.state.fallbacks
        )
        self._watching = EngineWatcher(self.config, self.state, self.relays, self.changed, self._tokenize)
        self._refreshing = Refresher(
            self.config.model,
            self.relays,
            self.vouching,
            interrupt=self.interrupt,
            changed=self.changed,
            probes=self.config.probe,
        )
        self._standing = [
            self._tasks.keep(self._tick, "fleet-tick"),
            self._tasks.keep(self.pinning.run, "version-pins"),
        ]
        try:
            for spec in self.config.engines:
                self.add(spec)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Stops looking, fails whoever still waits, and closes every connection."""
        self._places.close()
        if self._changing is not None:
            self._changing.cancel()
        for task in self._standing:
            task.cancel()
        for name in list(self.members):
            await self.remove(name)
        await self._tasks.close()

    # -- members

    def add(self, spec: EngineSpec) -> None:
        """Raises Conflict for a name or an address that is taken."""
        name = EngineName(spec.name)
        self._check_free(spec)
        adapter = connect(spec.kind, spec.url, self.config.model, stall_timeout_s=self.config.stall_timeout_s)
        state = EngineState(name, spec.kind, spec.url, spec.relay or "")
        if spec.relay is not None:
            self.relays.follow(spec.relay)
            state.available = self.relays.newest(spec.relay) or NO_VERSION
            state.loadable = self.relays.held(spec.relay)
        member = self.members[name] = EngineHandle(spec, adapter, state, self._timeline)
        self.state.add(state)
        watching = self._watching
        member.watcher = self._tasks.keep(
            lambda: watching.watch(member), f"watch-{name}", lambda error: watching.failed(member, error)
        )
        member.tether = self._tasks.keep(lambda: watching.hold_tether(member), f"tether-{name}")

    def _check_free(self, spec: EngineSpec) -> None:
        if spec.name in self.members:
            raise Conflict(
                f"there is already an engine named {spec.name!r}", hint=f"taken: {', '.join(sorted(self.members))}"
            )
        for name, member in self.members.items():
            if member.spec.url.rstrip("/") == spec.url.rstrip("/"):
                raise Conflict(f"{spec.url} is engine {name!r} already", hint="an engine counts once")

    async def probe(self, spec: EngineSpec) -> None:
        """Asks the engine what it is, without taking it in. Conflict for what is taken, Unavailable if it is no use."""
        self._check_free(spec)
        adapter = connect(spec.kind, spec.url, self.config.model, stall_timeout_s=self.config.stall_timeout_s)
        try:
            await adapter.report()
            await adapter.limits()
        except EngineFailed as e:
            raise Unavailable(
                f"engine {spec.name} cannot be used: {e.message}",
                hint=e.hint or 'start it first, or send "check": false to have it looked for',
            ) from e
        finally:
            await adapter.close()

    async def remove(self, name: EngineName) -> None:
        """Takes an engine out at once; its turns are cut and go on elsewhere. NotFound for an unknown name."""
        member = self.members.pop(name, None)
        if member is None:
            raise NotFound(f"no engine named {name!r}", hint=f"there are: {', '.join(sorted(self.members)) or 'none'}")
        self.state.remove(name)
        try:
            await member.close()
        finally:
            await self._let_go(member.spec.relay)
        self.changed()

    async def _let_go(self, relay: str | None) -> None:
        """Of a relay that no engine needs any more."""
        if relay is None or any(member.spec.relay == relay for member in self.members.values()):
            return
        await self.relays.let_go(relay)

    async def looked(self) -> None:
        """Returns when every engine was looked at once: each look has its deadline."""
        for member in list(self.members.values()):
            await member.looked.wait()

    # -- turns on engines

    async def place(self, demand: Demand | TextDemand, *, resumed: bool, timeout_s: float) -> Placement:
        """An engine for the turn, booked. Waits in the queue; OutOfCapacity when it is full or the wait too long."""
        return await self._places.place(demand, resumed=resumed, timeout_s=timeout_s)

    def enter(self, engine: EngineName, load: TurnLoad) -> None:
        """The turn runs on `engine` from now on."""
        self._places.enter(engine, load)

    def occupy(self, turn_id: TurnId, occupant: Occupant) -> None:
        """Who is to be interrupted when the turn's engine is needed, until it leaves the engine."""
        self._places.occupy(turn_id, occupant)

    def interrupt(self, turn_id: TurnId) -> None:
        """The engine of the turn is needed for something else: the turn goes on wherever there is a place."""
        self._places.interrupt(turn_id)

    def leave(self, engine: EngineName, turn_id: TurnId) -> None:
        """The turn no longer runs on `engine`."""
        self._places.leave(engine, turn_id)

    def engine_left(self, engine: EngineName) -> None:
        member = self.members.get(engine)
        if member is not None:
            member.left.set()
        if self._places.queued or member is None or not self.state.unmoved(member.state):
            self.change_soon()

    def decoded(self, engine: EngineName, num_tokens: int, seconds: float) -> None:
        """Tokens of one turn came `seconds` after those before them."""
        state = self.state.engines.get(engine)
        if state is not None:
            state.curve.observe(len(state.turns), num_tokens, seconds)
            self.state.token_s = mean_pace(self.state.token_s, num_tokens, seconds)

    def suspect(self, engine: EngineName) -> None:
        """A connection to it broke: it gets no turn before it was looked at, which is now."""
        member = self.members.get(engine)
        if member is not None:
            member.suspect()

    # -- what follows from a change

    def change_soon(self) -> None:
        """`changed`, once for all turns that leave engines or begin to wait in one round of the event loop.

        It looks at the whole queue. When engines load under a thousand turns all of them leave and wait again: once for
        each of them took nearly two seconds of a core, in which no engine could begin to load.
        """
        if self._changing is None:
            self._changing = asyncio.get_running_loop().call_soon(self.changed)

    def changed(self) -> None:
        """Opens and closes intakes, starts refreshes that became possible, serves the queue."""
        if self._changing is not None:
            self._changing.cancel()
            self._changing = None
        now = time.monotonic()
        for change in intake_changes(self.state, now):
            state = "intake open" if change.open else "intake closed"
            self._timeline.add("engine", engine=change.engine, state=state, reason=change.reason)
        self.state.insisted, self.state.waiting_since = self._places.wanted(), self._places.waiting_since()
        self._start_refreshes(now)
        self._note_holds(now)
        self._places.serve()

    def _start_refreshes(self, now: float) -> None:
        for decision in refresh_decisions(self.state, now):
            member = self.members[decision.engine]
            refresh = self._refreshing.refresh(member, decision)
            member.refresher = self._tasks.start(refresh, f"refresh-{decision.engine}")

    def _note_holds(self, now: float) -> None:
        """Says once whenever an engine begins to stay on its version for sessions."""
        for member in self.members.values():
            held = member.state.held_since is not None
            if held and not member.held:
                reason = closed_reason(self.state, member.state, now)
                log.info("engine %s %s; %d turns wait", member.state.name, reason, self._places.queued)
                self._timeline.add("engine", engine=member.state.name, state="held", reason=reason)
            member.held = held

    def _available(self, address: str, version: Version) -> None:
        if version > self.state.newest:
            self.state.newest = version
        held = self.relays.held(address)
        for member in self.members.values():
            if member.spec.relay == address:
                member.state.loadable = held
                if version > member.state.available:
                    member.state.available = version
                    self.version_available.set()
        if version:
            self._timeline.add("version", version=version, relay=address)
        for member in list(self.members.values()):
            self._watching.settle(member)
        self.changed()

    async def _tick(self) -> None:
        """Ages and holds run out by the clock, without any event."""
        while True:
            await asyncio.sleep(TICK_S)
            self.changed()

    def statistics(self) -> FleetStatistics:
        return FleetStatistics(
            self._refreshing.refreshes,
            self._refreshing.failures,
            self._refreshing.unchanged,
            self._places.queued,
            self._places.reasons(),
        )
