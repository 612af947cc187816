"""The shell around `core.fleet`: looks at engines, refreshes them, and gives turns their places.

Owner of `FleetState`: everything here runs on one event loop, and state changes only between awaits.
- one watcher task per engine (reports, death, return, refresh); what relays hold is heard from `relays`;
- turns that must wait stand in one bounded queue, served in order whenever anything changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from gateway.config import EngineSpec, GatewayConfig
from gateway.core.fleet import EngineState, EngineStatus, FleetState, RefreshDecision, TurnLoad
from gateway.core.scheduler import Admission, Demand, Lost, Placement, Refusals, Wait, admit, place, wanted_versions
from gateway.core.types import NO_VERSION, EngineName, TurnId, Version
from gateway.core.waiting import Pace, retry_for_a_place
from gateway.data import Timeline
from gateway.engines.base import EngineAdapter, EngineFailed, EngineReport, SnapshotRefused, version_of
from gateway.engines.kinds import connect
from gateway.engines.tether import until_broken
from gateway.relays import Relays
from gateway.vouching import Vouching
from paramserver.client import Lease, RelayClient
from protos.errors import Conflict, LaminarError, NotFound, OutOfCapacity, Unavailable, VersionLost

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


@dataclass(slots=True)
class Waiter:
    """A turn in the queue. `resumed` ones are served before new ones: their clients have waited already."""

    demand: Demand
    resumed: bool
    placed: asyncio.Future[Placement]
    reason: str = ""
    retry_after_s: float | None = None


@dataclass(slots=True)
class Member:
    """One engine with what the shell holds for it."""

    spec: EngineSpec
    adapter: EngineAdapter
    state: EngineState
    look: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a turn left
    looked: asyncio.Event = field(default_factory=asyncio.Event)  # once, whatever was seen
    failed_polls: int = 0
    refresh_failures: int = 0
    watcher: asyncio.Task[None] | None = None
    tether: asyncio.Task[None] | None = None
    refresher: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class FleetStatistics:
    refreshes: int
    refresh_failures: int
    queued: int


class Fleet:
    """`async with Fleet(...)`. `place` and `leave` frame every turn's stay on an engine."""

    def __init__(self, config: GatewayConfig, timeline: Timeline, admission: Callable[[], Admission]) -> None:
        self.config = config
        self.state = FleetState(config.fleet)
        self.members: dict[EngineName, Member] = {}
        self.interrupt: Callable[[TurnId], object] = lambda turn_id: None  # asks a turn to leave its engine
        self.version_available = asyncio.Event()  # some engine could load a newer version: wakes the repack loop
        self.vouching = Vouching(self.members)
        self._timeline = timeline
        self._admission = admission
        self._queue: deque[Waiter] = deque()
        self._left = Pace()  # turns leaving engines
        self.relays: Relays
        self._refreshes = 0
        self._refresh_failures = 0
        self._stack = AsyncExitStack()
        self._tasks: asyncio.TaskGroup

    async def __aenter__(self) -> Fleet:
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self.relays = Relays(self.config.model, self._tasks, self._available)
        self._ticker = self._tasks.create_task(self._tick(), name="fleet-tick")
        try:
            for spec in self.config.engines:
                self.add(spec)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Stops looking, fails whoever still waits, and closes every connection."""
        for waiter in self._queue:
            if not waiter.placed.done():
                waiter.placed.set_exception(Unavailable("the gateway is shutting down", hint="ask again soon"))
        self._queue.clear()
        self._ticker.cancel()
        for name in list(self.members):
            await self.remove(name)
        await self._stack.aclose()

    # -- members

    def add(self, spec: EngineSpec) -> None:
        """Raises Conflict for a name or an address that is taken."""
        name = EngineName(spec.name)
        self._check_free(spec)
        adapter = connect(spec.kind, spec.url, self.config.model, stall_timeout_s=self.config.stall_timeout_s)
        state = EngineState(name, spec.kind, spec.url)
        if spec.relay is not None:
            self.relays.follow(spec.relay)
            state.available = self.relays.newest(spec.relay) or NO_VERSION
        member = self.members[name] = Member(spec, adapter, state)
        self.state.engines[name] = state
        member.watcher = self._tasks.create_task(self._watch_engine(member), name=f"watch-{name}")
        member.tether = self._tasks.create_task(self._hold_tether(member), name=f"tether-{name}")

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
        del self.state.engines[name]
        tasks = [task for task in (member.watcher, member.tether, member.refresher) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.wait(tasks)
        finally:  # who asked may be cancelled meanwhile: nothing is left behind for that
            await member.adapter.close()
            await self._let_go(member.spec.relay)
        self.changed()

    async def _let_go(self, relay: str | None) -> None:
        """Of a relay that no engine needs any more."""
        if relay is None or any(member.spec.relay == relay for member in self.members.values()):
            return
        await self.relays.let_go(relay)

    # -- places for turns

    async def place(self, demand: Demand, *, resumed: bool, timeout_s: float) -> Placement:
        """An engine for the turn, booked. Waits in the queue; OutOfCapacity when it is full or the wait too long."""
        if not self._queue or resumed:
            outcome = place(demand, self.state, self._admission())
            if isinstance(outcome, Placement):
                self._book(outcome, demand)
                return outcome
            if isinstance(outcome, Lost):
                raise _version_lost(outcome, demand)
        if len(self._queue) >= self.config.queue_max and not resumed:
            waiting = len(self._queue)
            after_s = retry_for_a_place(waiting, self._left, time.monotonic())
            raise OutOfCapacity(f"{waiting} turns wait for an engine already", retry_after_s=after_s)
        waiter = Waiter(demand, resumed, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self.changed()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.placed
        except TimeoutError:
            self._unbook(waiter)
            retry_after_s = waiter.retry_after_s
            if retry_after_s is None:
                retry_after_s = retry_for_a_place(len(self._queue) - 1, self._left, time.monotonic())
            raise OutOfCapacity(
                f"no engine took the turn within {timeout_s:g} s: {waiter.reason}", retry_after_s=retry_after_s
            ) from None
        except asyncio.CancelledError:
            self._unbook(waiter)
            raise
        finally:
            if waiter in self._queue:
                self._queue.remove(waiter)

    def _unbook(self, waiter: Waiter) -> None:
        placed, turn_id = waiter.placed, waiter.demand.turn_id
        if turn_id is not None and placed.done() and not placed.cancelled() and placed.exception() is None:
            self.leave(placed.result().engine, turn_id)

    def enter(self, engine: EngineName, load: TurnLoad) -> None:
        """The turn runs on `engine` from now on."""
        self.state.engines[engine].turns[load.turn_id] = load

    def leave(self, engine: EngineName, turn_id: TurnId) -> None:
        """The turn no longer runs on `engine`."""
        member = self.members.get(engine)
        if member is not None:
            if member.state.turns.pop(turn_id, None) is not None:
                self._left.happened(time.monotonic())
            member.left.set()
        self.changed()

    def decoded(self, engine: EngineName, num_tokens: int, seconds: float) -> None:
        """Tokens of one turn came `seconds` after those before them."""
        state = self.state.engines.get(engine)
        if state is not None:
            state.curve.observe(len(state.turns), num_tokens, seconds)

    def suspect(self, engine: EngineName) -> None:
        """A connection to it broke: it gets no turn before it was looked at, which is now."""
        member = self.members.get(engine)
        if member is not None:
            member.state.suspected = member.state.status == "serving"
            member.look.set()

    def changed(self) -> None:
        """Opens and closes intakes, starts refreshes that became possible, serves the queue."""
        now = time.monotonic()
        for change in self.state.intake_changes(now):
            state = "intake open" if change.open else "intake closed"
            self._timeline.add("engine", engine=change.engine, state=state, reason=change.reason)
        self.state.insisted = wanted_versions(w.demand for w in self._queue if not w.placed.done())
        self._start_refreshes(now)
        self._serve_queue()

    def statistics(self) -> FleetStatistics:
        return FleetStatistics(self._refreshes, self._refresh_failures, len(self._queue))

    def _serve_queue(self) -> None:
        admission, refusals = self._admission(), Refusals()
        for waiter in sorted(self._queue, key=lambda w: not w.resumed):
            if waiter.placed.done():
                continue
            demand = waiter.demand
            outcome = refusals.told(demand, self.state) or place(demand, self.state, admission)
            if isinstance(outcome, Wait):
                waiter.reason, waiter.retry_after_s = outcome.reason, outcome.retry_after_s
                refusals.note(demand, self.state, outcome)
                continue
            if isinstance(outcome, Lost):
                waiter.placed.set_exception(_version_lost(outcome, demand))
                continue
            self._book(outcome, demand)
            admission = self._admission()  # one more runs
            waiter.placed.set_result(outcome)
            self._queue.remove(waiter)

    def _book(self, placement: Placement, demand: Demand) -> None:
        admit(placement, demand, self.state)
        # A place counts from now on, not from when the turn's task comes to run: others are placed meanwhile.
        turn_id = demand.turn_id
        if turn_id is not None:
            load = TurnLoad(turn_id, demand.session.session_id, demand.prompt_tokens, demand.prompt_tokens)
            self.state.engines[placement.engine].turns[turn_id] = load

    async def looked(self) -> None:
        """Returns when every engine was looked at once: each look has its deadline."""
        for member in list(self.members.values()):
            await member.looked.wait()

    # -- looking at engines

    async def _watch_engine(self, member: Member) -> None:
        while True:
            member.look.clear()
            try:
                report = await member.adapter.report()
                await self._alive(member, report)
            except EngineFailed as e:
                self._unreachable(member, e)
            member.looked.set()
            try:
                async with asyncio.timeout(self.config.poll_interval_s):
                    await member.look.wait()
            except TimeoutError:
                continue

    async def _hold_tether(self, member: Member) -> None:
        while True:
            if await until_broken(member.spec.url):
                self.suspect(member.state.name)
            await asyncio.sleep(self.config.poll_interval_s)

    def _trust(self, member: Member) -> None:
        """It answered as the incarnation it was, and nothing broke since it was asked."""
        if member.state.suspected and not member.look.is_set():
            member.state.suspected = False
            self.changed()

    async def _alive(self, member: Member, report: EngineReport) -> None:
        state = member.state
        member.failed_polls = 0
        state.kv_usage, state.running_reported = report.kv_usage, report.running
        state.waiting_reported = report.waiting
        self.state.kv_ceiling(state).observe(report.kv_usage, report.running, report.waiting)
        restarted = state.incarnation != report.incarnation
        if state.status != "dead" and not (restarted or state.must_load or state.suspected):
            return
        limits = await member.adapter.limits()
        if state.status == "refreshing":
            return  # its refresh fails by itself and fences it; the next look goes on from there
        relabelled = state.status == "serving" and version_of(limits.weight_version) != state.version
        if state.status == "serving" and not restarted and not relabelled:
            self._trust(member)
            return
        if (restarted or relabelled) and state.status not in ("dead", "joining"):
            what = "it was restarted" if restarted else f"it says {limits.weight_version!r}, not {state.version}"
            self._set(member, "dead", what)
        if restarted:
            state.begin_anew()
        state.incarnation = report.incarnation
        state.context_tokens, state.kv_capacity_tokens = limits.context_tokens, limits.kv_capacity_tokens
        state.version = version_of(limits.weight_version)
        state.must_load = limits.fenced
        if state.status == "dead":
            what = "fenced: it must load before it serves" if limits.fenced else f"holds version {state.version}"
            self._set(member, "joining", f"answers; {what}")
        self._settle(member)

    def _settle(self, member: Member) -> None:
        """A joining engine serves once it holds a wanted version: its host's newest, one that live sessions are on, or
        any while there is none."""
        state = member.state
        wanted = self.state.wanted(state)
        if state.status == "joining" and wanted and self._relay_seen(member):
            self._set(member, "serving", f"version {state.version}")
        self.changed()

    def _relay_seen(self, member: Member) -> bool:
        """Whether its relay has told what it holds: before that nobody knows which version is wanted."""
        return member.spec.relay is None or self.relays.newest(member.spec.relay) is not None

    def _unreachable(self, member: Member, error: EngineFailed) -> None:
        member.failed_polls += 1
        if member.state.status == "dead" and member.state.last_error != error.message:
            log.warning("engine %s does not answer: %s", member.state.name, error)
        member.state.last_error = error.message
        if member.state.status != "dead" and member.failed_polls >= self.config.dead_after_polls:
            self._set(member, "dead", error.message)
            member.state.incarnation = ""
            self.changed()
        elif member.state.status != "dead":
            asyncio.get_running_loop().call_later(RETRY_S / 5, member.look.set)

    def _set(self, member: Member, status: EngineStatus, reason: str) -> None:
        member.state.to(status)
        self._timeline.add("engine", engine=member.state.name, state=status, reason=reason)
        log.info("engine %s: %s: %s", member.state.name, status, reason)

    # -- versions

    def _available(self, address: str, version: Version) -> None:
        if version > self.state.newest:
            self.state.newest = version
        for member in self.members.values():
            if member.spec.relay == address and version > member.state.available:
                member.state.available = version
                self.version_available.set()
        if version:
            self._timeline.add("version", version=version, relay=address)
        for member in list(self.members.values()):
            self._settle(member)
        self.changed()

    # -- refresh

    def _start_refreshes(self, now: float) -> None:
        for decision in self.state.refresh_decisions(now):
            member = self.members[decision.engine]
            member.refresher = self._tasks.create_task(
                self._refresh(member, decision), name=f"refresh-{decision.engine}"
            )

    async def _refresh(self, member: Member, decision: RefreshDecision) -> None:
        """Acquire, fence, load, verify, label, unfence, release. On any error the engine stays fenced."""
        state, before = member.state, member.state.version
        started = time.monotonic()
        await self._interrupt(member, decision)
        if decision.served:
            await self.vouching.prove(state.name)
        try:
            version, fenced_s = await self._load(member, decision)
        except _NotAcquired as e:
            self._not_reloaded(member, decision, e)
            return
        except LaminarError as e:
            self._refresh_failed(member, decision, e)
            return
        state.loaded(version)
        member.refresh_failures = 0
        self._refreshes += 1
        seconds = time.monotonic() - started
        self._timeline.add(
            "refresh",
            engine=state.name,
            from_version=before,
            to_version=version,
            seconds=seconds,
            pause_s=fenced_s,
            reason=decision.reason,
        )
        if state.status == "refreshing":
            self._set(member, "serving", f"version {version}")
            if state.newer:
                state.close_intake(time.monotonic())  # it is there for those who insist on it
            else:
                state.open_intake(time.monotonic())
        self.changed()

    async def _interrupt(self, member: Member, decision: RefreshDecision) -> None:
        """Asks turns to leave; what has not left when the load begins is cut by it, and resumes like any other."""
        for turn_id in decision.interrupted:
            self.interrupt(turn_id)
        try:
            async with asyncio.timeout(INTERRUPT_MAX_S):
                while member.state.turns:
                    member.left.clear()
                    await member.left.wait()
        except TimeoutError:
            log.warning("engine %s loads with %d turns on it", member.spec.name, len(member.state.turns))

    def _not_reloaded(self, member: Member, decision: RefreshDecision, error: _NotAcquired) -> None:
        """Nothing was done to the engine: it serves on."""
        if error.gone:
            self.state.gone.add(decision.to_version)
        member.state.refresh_not_before = time.monotonic() + RETRY_S
        log.warning("version %d cannot be loaded again: %s", decision.to_version, error)
        if member.state.status == "refreshing":
            self._set(member, "serving", f"version {member.state.version}; {decision.to_version} was not to be had")
            member.state.open_intake(time.monotonic())
        self.changed()

    async def _load(self, member: Member, decision: RefreshDecision) -> tuple[Version, float]:
        assert member.spec.relay is not None
        relay = self.relays.client(member.spec.relay)
        lease = await self._acquire(relay, f"gateway/{member.spec.name}", decision)
        renewing = asyncio.create_task(_keep(relay, lease), name=f"renew-{member.spec.name}")
        try:
            fenced_s = await member.adapter.load(lease.path, lease.version, lease.root_digest)
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            await relay.release(lease)  # a pin that lapsed raises: then the load does not count
        return Version(lease.version), fenced_s

    async def _acquire(self, relay: RelayClient, holder: str, decision: RefreshDecision) -> Lease:
        """What was decided; the newest, which may be newer by now, unless it was an older one."""
        if decision.again:
            try:
                return await relay.acquire(self.config.model, decision.to_version, holder=holder, ttl_s=LEASE_TTL_S)
            except LaminarError as e:
                raise _NotAcquired(e) from e
        wanted = await self._before(relay, decision.to_version) if decision.before else None
        return await relay.acquire(self.config.model, wanted, holder=holder, ttl_s=LEASE_TTL_S)

    async def _before(self, relay: RelayClient, version: Version) -> int:
        older = [v.version for v in await relay.versions(self.config.model) if v.version < version]
        if not older:
            raise NotFound(
                f"{relay.address} holds nothing before version {version}", hint="publish a version that loads"
            )
        return older[-1]

    def _refresh_failed(self, member: Member, decision: RefreshDecision, error: LaminarError) -> None:
        member.refresh_failures += 1
        self._refresh_failures += 1
        wait_s = min(RETRY_MAX_S, RETRY_S * 2 ** (member.refresh_failures - 1))
        state = member.state
        state.load_failed(decision, by_engine=isinstance(error, EngineFailed))
        state.refresh_not_before = time.monotonic() + wait_s
        state.last_error = str(error)
        untouched = isinstance(error, SnapshotRefused) and decision.served
        what = f"goes on with version {state.version}" if untouched else "stays fenced"
        log.warning("engine %s %s, next try in %.0f s: %s", state.name, what, wait_s, error)
        if state.status == "refreshing":
            self._set(member, "serving" if untouched else "fenced", str(error))
        member.look.set()
        self.changed()

    async def _tick(self) -> None:
        """Ages and holds run out by the clock, without any event."""
        while True:
            await asyncio.sleep(0.5)
            self.changed()


def _version_lost(outcome: Lost, demand: Demand) -> VersionLost:
    policy = demand.session.spec.on_version_loss
    return VersionLost(
        f"session {demand.session.session_id}: {outcome.reason}",
        hint=f"it was made with on_version_loss={policy!r}; 'segment' goes on under another version",
    )


async def _keep(relay: RelayClient, lease: Lease) -> None:
    while True:
        await asyncio.sleep(lease.ttl_s / 3)
        await relay.renew(lease)
