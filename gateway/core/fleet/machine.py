"""The fleet as one machine: events in, effects out. The only writer of `FleetState` and its engines. Pure.

Invariants:
- an event of an engine that is not in the fleet changes nothing;
- an engine that responds as another incarnation, or with another version label than the one that was loaded, serves no
  more before it has joined anew;
- a suspected engine serves again only after a response to a request that was sent after the suspicion: a response to
  an earlier one may have been on its way when the engine died. One that says itself that it is not ready, or on which
  turn after turn failed (`gateway.core.faults`), stays suspected until that is over;
- on any error after the fence the engine stays fenced: it may hold half a version, or compute nothing of use;
- `changed` has every engine for which a round (`RoundBegan`) may decide otherwise than the last one did, but for what
  the clock alone changes. The owner begins a round soon after an event that leaves it non-empty, and now and then one
  over everything.

`handle` finds each event's method in `HANDLERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gateway.core.fleet.curves import KvCeiling, mean_pace
from gateway.core.fleet.events import (
    Added,
    ConnectionBroke,
    Described,
    DtypeReported,
    Effect,
    Emptied,
    Emptying,
    EngineEvent,
    Event,
    HoldBegan,
    Learnt,
    Loaded,
    LoadFailed,
    NotAcquired,
    Noted,
    Placed,
    Polled,
    PollFailed,
    PollMissed,
    PollWanted,
    RelayReported,
    Removed,
    RoundBegan,
    SessionEnded,
    SessionMade,
    SessionRestored,
    TokensCame,
    TurnEndedWell,
    TurnEntered,
    TurnFailed,
    TurnLeft,
    VersionCame,
)
from gateway.core.fleet.intake import intake_changes
from gateway.core.fleet.labels import UNNAMED, is_version, version_of
from gateway.core.fleet.modes import mode_of
from gateway.core.fleet.order import Pool
from gateway.core.fleet.refresh import load_failed, refresh_decisions, retry_s
from gateway.core.fleet.state import EngineState, EngineStatus, FleetState
from gateway.core.sessions import SessionState
from gateway.core.types import EngineName, Version
from protos.foreign_text import quoted
from protos.trajectories import VersionChange

POLL_AGAIN_S = 0.2
"""After a poll that failed. The engine counts as dead only after several of them."""
NOT_READY = "it says that it is not ready: it was paused, or ends once its last turn has ended"
IGNORES_SEEDS = "ignores the `seed` of a request (SGLang takes it with --enable-deterministic-inference alone)"


class FleetMachine:
    """`state` is read by everybody."""

    def __init__(self, state: FleetState) -> None:
        self.state = state
        self.changed: set[EngineName] = set()
        self._came = False  # a newer version came to an engine's relay since the last round

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        """What follows. `now`: of the monotonic clock."""
        handler = HANDLERS[type(event)]
        if not isinstance(event, EngineEvent):
            return tuple(handler(self, event, now) or ())
        engine = self.state.engines.get(event.engine)
        return () if engine is None else tuple(handler(self, engine, event, now) or ())

    def _regard(self, version: Version) -> None:
        """Engines came to the version, or left it: another may have become the last one, or no longer be that."""
        if self.state.num_serving(Pool(version)) <= 2:
            self.changed.update(engine.name for engine in self.state.serving(Pool(version)))

    def _regard_all(self, version: Version) -> None:
        """Live sessions need the version from now on, or no longer."""
        self.changed.update(engine.name for engine in self.state.engines.values() if engine.version == version)

    def _change(self, engine: EngineState, status: EngineStatus, reason: str, now: float) -> Iterator[Effect]:
        engine.to(status)
        engine.status_since = now
        self.changed.add(engine.name)
        self._regard(engine.version)
        yield Noted(engine.name, status, reason, f": {status}: {reason}")

    # -- engines come, go, and report

    def _added(self, event: Added, now: float) -> None:
        self.state.add(event.state)

    def _removed(self, engine: EngineState, event: Removed, now: float) -> None:
        self.state.remove(engine.name)
        self.changed = set(self.state.engines)  # others may have waited for it

    def _polled(self, engine: EngineState, event: Polled, now: float) -> Iterator[Effect]:
        engine.failed_polls = 0
        engine.kv_usage, engine.running_reported, engine.waiting_reported = event.kv_usage, event.running, event.waiting
        engine.ceiling = engine.ceiling or KvCeiling(self.state.config.kv_max)
        engine.ceiling.observe(event.kv_usage, event.running, event.waiting)
        # Else this gateway may have paused it itself, for a load.
        if not event.ready and engine.status == "serving" and engine.status_since < event.began:
            yield from self._shun(engine, NOT_READY, now)
            if engine.ready:
                engine.note_ready(False)
                self.changed.add(engine.name)
        if engine.incarnation != event.incarnation:
            engine.dtype = ""
            yield from self._restarted(engine, now)
        elif not engine.unlike(event.incarnation):
            engine.poll_error = ""

    def _restarted(self, engine: EngineState, now: float) -> Iterator[Effect]:
        """A refresh fails by itself and fences it; the next poll goes on from there."""
        if engine.status in ("serving", "fenced"):
            yield from self._change(engine, "dead", "it was restarted", now)

    def _described(self, engine: EngineState, event: Described, now: float) -> Iterator[Effect]:
        engine.poll_error = ""
        if engine.status == "refreshing":
            return
        restarted = engine.incarnation != event.incarnation
        if restarted:
            yield from self._restarted(engine, now)
            engine.begin_anew()
        elif engine.status == "serving":
            if version_of(event.label, engine.started_with) == engine.version:
                yield from self._answered(engine, event, now)
                return
            yield from self._change(engine, "dead", f"it reports {event.label!r}, not {engine.version}", now)
        yield from self._joined(engine, event, now)

    def _joined(self, engine: EngineState, event: Described, now: float) -> Iterator[Effect]:
        """Takes over what the engine reports of itself."""
        engine.context_tokens, engine.kv_capacity_tokens = event.context_tokens, event.kv_capacity_tokens
        label = "" if is_version(event.label) or event.label in UNNAMED else event.label
        if label and label != engine.started_with:
            named = f" calls its weights {quoted(label)}, which is no version: they count as version 0"
            yield Noted(engine.name, text=named, warns=True)
        engine.started_with = label
        if engine.seeds and not event.seeds:
            yield Noted(engine.name, text=f" {IGNORES_SEEDS}", warns=True)
        engine.seeds = event.seeds
        engine.joined(event.incarnation, version_of(event.label), must_load=event.fenced)
        self.changed.add(engine.name)
        if engine.status == "dead":
            fenced = "fenced: it must load before it serves" if engine.loads else "paused: it serves once it is resumed"
            held = fenced if event.fenced else f"holds version {engine.version}"
            yield from self._change(engine, "joining", f"responds; {held}", now)
        if engine.status == "joining":
            yield from self._settle(engine, now)

    def _settle(self, engine: EngineState, now: float) -> Iterator[Effect]:
        """A joining engine serves once it holds a wanted version: its host's newest, one that live sessions are on, or
        any while there is none. Before its relay has reported, the wanted version is not known."""
        if self.state.wanted(engine) and engine.loadable is not None:
            yield from self._change(engine, "serving", f"version {engine.version}", now)

    def _dtype_reported(self, engine: EngineState, event: DtypeReported, now: float) -> None:
        engine.dtype = event.dtype

    def _poll_failed(self, engine: EngineState, event: PollFailed, now: float) -> Iterator[Effect]:
        engine.failed_polls += 1
        if engine.failed_polls == 1:
            yield PollMissed(engine.name, event.error)
        engine.poll_error = event.error
        if engine.status == "dead":
            return
        if engine.failed_polls < event.dead_after:
            yield PollWanted(engine.name, POLL_AGAIN_S)
            return
        yield from self._change(engine, "dead", event.error, now)
        engine.incarnation = ""

    def _relay_reported(self, event: RelayReported, now: float) -> None:
        self.state.newest = max(self.state.newest, event.version)
        for name in self.state.beside.get(event.relay, ()):
            engine = self.state.engines[name]
            engine.loadable = event.held
            if event.version > engine.available:
                engine.available, self._came = event.version, True
            self.changed.add(name)

    # -- suspicion

    def _connection_broke(self, engine: EngineState, event: EngineEvent, now: float) -> Iterator[Effect]:
        """It gets no turn before it responded to another poll, which is made now."""
        if engine.status == "serving":
            engine.suspect(now)
        yield PollWanted(engine.name)

    def _shun(self, engine: EngineState, why: str, now: float) -> Iterator[Effect]:
        """It gets no turn before a later poll shows that `why` is over."""
        if engine.status != "serving":
            return
        if engine.suspicion != why:
            yield Noted(engine.name, "suspected", why, f" gets no turns: {why}", warns=True)
        engine.suspect(now, why)

    def _answered(self, engine: EngineState, event: Described, now: float) -> Iterator[Effect]:
        """It responded as the same incarnation to a request that was sent after every suspicion of it."""
        out = engine.faults.left_s(now) > 0
        if engine.suspected and event.ready and not out and engine.suspected_at < event.began:
            if engine.suspicion:
                yield Noted(engine.name, engine.status, "it gets turns again", " gets turns again")
            engine.trust()
            self.changed.add(engine.name)

    # -- loads

    def _loaded(self, engine: EngineState, event: Loaded, now: float) -> Iterator[Effect]:
        engine.loaded(event.version)
        if engine.status == "refreshing":
            yield from self._change(engine, "serving", f"version {event.version}", now)
            if engine.newer:
                engine.close_intake(now)  # it serves only the sessions that insist on this version
            else:
                engine.open_intake(now)

    def _not_acquired(self, engine: EngineState, event: NotAcquired, now: float) -> Iterator[Effect]:
        """It goes on serving."""
        engine.refresh_not_before = now + retry_s(1)
        if engine.status == "refreshing":
            reason = f"version {engine.version}; {event.version} could not be acquired"
            yield from self._change(engine, "serving", reason, now)
            engine.open_intake(now)

    def _load_failed(self, engine: EngineState, event: LoadFailed, now: float) -> Iterator[Effect]:
        decision = event.decision
        engine.refresh_failures = 1 + (engine.refresh_failures if engine.tried == decision.to_version else 0)
        wait_s = retry_s(engine.refresh_failures)
        load_failed(engine, decision, event.error, by_engine=event.by_engine)
        engine.refresh_not_before = now + wait_s
        what = f"goes on with version {engine.version}" if event.untouched else "stays fenced"
        text = f" {what}, next try in {wait_s:.0f} s: {event.error}"
        yield Noted(engine.name, text=text, warns=True, version=decision.to_version)
        if engine.status == "refreshing":
            yield from self._change(engine, "serving" if event.untouched else "fenced", event.error, now)
        self.changed.add(engine.name)
        yield PollWanted(engine.name)

    def _emptying(self, engine: EngineState, event: Emptying, now: float) -> None:
        engine.leaving = event.began
        self.changed.add(engine.name)

    # -- turns

    def _placed(self, engine: EngineState, event: Placed, now: float) -> None:
        if event.session is None:
            engine.admit(1)
        else:
            self._book(engine, event, event.session)
        if event.load is not None:
            engine.enter(event.load)
        self._moved(engine)

    def _book(self, engine: EngineState, event: Placed, session: SessionState) -> None:
        """The session's version, its group's, and the engine's intake."""
        fleet, spec = self.state, session.spec
        if session.version is None:
            version = fleet.group_versions.get(spec.group_id)
            if version is None or not fleet.num_serving(Pool(version)):
                fleet.group_versions.note(spec.group_id, engine.version)
                engine.admit(spec.group_size)
        elif session.version != engine.version:
            request = None if event.turn_id is None else session.running.get(event.turn_id)
            turn = session.turns if request is None else request.turn_index
            change = VersionChange(turn, event.turn_id or "", session.version, engine.version, event.reason)
            session.version_changes.append(change)
        session.version, session.engine = engine.version, engine.name
        self._count(session)
        fleet.prefixes.sent(event.prefix, engine.name, engine.holding)
        fleet.pinned.note(session.session_id, session.version if session.insists else None)
        self._keep(session)

    def _keep(self, session: SessionState) -> None:
        """Its version is needed for as long as it lives, if it can have further turns."""
        fleet, version = self.state, session.version
        if version is None or session.spec.ephemeral or session.spec.unnamed:
            return
        before, needed = fleet.session_versions.get(session.session_id), fleet.needed(version)
        fleet.note_session(session.session_id, version, session.spec.on_version_loss)
        if not needed:
            self._regard_all(version)
        if before is not None and not fleet.needed(before):
            self._regard_all(before)

    def _moved(self, engine: EngineState) -> None:
        if not self.state.unmoved(engine):
            self.changed.add(engine.name)

    def _turn_entered(self, engine: EngineState, event: TurnEntered, now: float) -> None:
        engine.enter(event.load)

    def _turn_left(self, engine: EngineState, event: TurnLeft, now: float) -> Sequence[Effect]:
        engine.leave(event.turn_id)
        self._moved(engine)
        return () if engine.turns or engine.status == "serving" else (Emptied(engine.name),)

    def _turn_failed(self, engine: EngineState, event: TurnFailed, now: float) -> Iterator[Effect]:
        """The engine is suspected, and out for a while if turn after turn fails."""
        yield from self._connection_broke(engine, event, now)
        out_s = engine.faults.failed(event.turn_id, now, event.cut) if event.to_blame else 0.0
        if out_s:
            why = f"turn after turn failed on it, so it gets none for {out_s:g} s; the last: {event.cut}"
            yield from self._shun(engine, why, now)
            yield PollWanted(engine.name, out_s)

    def _turn_ended_well(self, engine: EngineState, event: TurnEndedWell, now: float) -> None:
        engine.faults.ended_well()

    def _tokens_came(self, engine: EngineState, event: TokensCame, now: float) -> None:
        batch = len(engine.turns) if event.batch is None else event.batch
        engine.curve.observe(batch, event.tokens, event.seconds)
        self.state.token_s = mean_pace(self.state.token_s, event.tokens, event.seconds)

    # -- sessions

    def _session_made(self, event: SessionMade, now: float) -> None:
        """It may continue under one version alone, which it names."""
        self.state.pinned.note(event.session.session_id, event.session.spec.version)
        self._count(event.session)

    def _count(self, session: SessionState) -> None:
        if session.version is not None and session.spec.trains:
            self.state.training.add(session.session_id)

    def _session_restored(self, event: SessionRestored, now: float) -> None:
        fleet, session = self.state, event.session
        self._count(session)
        if session.version is not None and not (session.spec.ephemeral or session.spec.unnamed):
            self._keep(session)
            if fleet.group_versions.get(session.spec.group_id) is None:
                fleet.group_versions.note(session.spec.group_id, session.version)
            fleet.pinned.note(session.session_id, session.version if session.insists else None)

    def _session_ended(self, event: SessionEnded, now: float) -> None:
        fleet, spec = self.state, event.session.spec
        version = fleet.session_versions.get(spec.session_id)
        fleet.pinned.note(spec.session_id, None)
        fleet.forget_session(spec.session_id)
        if version is not None and not fleet.needed(version):
            self._regard_all(version)
        if event.forgotten:
            fleet.group_versions.session_ended(spec.group_id, spec.group_size)
            fleet.training.discard(spec.session_id)

    # -- what is learnt, and the round of decisions

    def _learnt(self, event: Learnt, now: float) -> None:
        fleet = self.state
        fleet.turn_tokens = event.turn_tokens or fleet.turn_tokens
        fleet.prefill_tokens_per_s = event.prefill_tokens_per_s or fleet.prefill_tokens_per_s

    def _round_began(self, event: RoundBegan, now: float) -> Iterator[Effect]:
        """Joining engines serve, intakes open and close, refreshes begin. Turns that wait may end any hold."""
        fleet, changed = self.state, self.changed
        self.changed = set()
        fleet.insisted, fleet.waiting_since = event.insisted, event.waiting_since
        if event.everything or mode_of(fleet.config).together:
            engines = fleet.sorted_engines()
        else:
            names = changed | fleet.held if event.waiting_since else changed
            engines = [fleet.engines[name] for name in sorted(names) if name in fleet.engines]
        for engine in engines:
            if engine.status == "joining":
                yield from self._settle(engine, now)
        for change in intake_changes(fleet, now, engines):
            self.changed.add(change.engine)  # one that is full and closes may open again
            yield change
        for decision in refresh_decisions(fleet, now, engines):
            self._regard(fleet.engines[decision.engine].version)
            yield decision
        for engine in engines:
            held = engine.held_since is not None
            if held and not engine.held_noted:
                yield HoldBegan(engine.name)
            engine.held_noted = held
        if self._came:
            self._came = False
            yield VersionCame()


HANDLERS: Mapping[type[Event], Callable[..., Iterable[Effect] | None]] = {
    Added: FleetMachine._added,
    Removed: FleetMachine._removed,
    Polled: FleetMachine._polled,
    Described: FleetMachine._described,
    DtypeReported: FleetMachine._dtype_reported,
    PollFailed: FleetMachine._poll_failed,
    ConnectionBroke: FleetMachine._connection_broke,
    RelayReported: FleetMachine._relay_reported,
    Loaded: FleetMachine._loaded,
    NotAcquired: FleetMachine._not_acquired,
    LoadFailed: FleetMachine._load_failed,
    Emptying: FleetMachine._emptying,
    Placed: FleetMachine._placed,
    TurnEntered: FleetMachine._turn_entered,
    TurnLeft: FleetMachine._turn_left,
    TurnFailed: FleetMachine._turn_failed,
    TurnEndedWell: FleetMachine._turn_ended_well,
    TokensCame: FleetMachine._tokens_came,
    SessionMade: FleetMachine._session_made,
    SessionRestored: FleetMachine._session_restored,
    SessionEnded: FleetMachine._session_ended,
    Learnt: FleetMachine._learnt,
    RoundBegan: FleetMachine._round_began,
}
