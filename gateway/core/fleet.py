"""The fleet as the gateway knows it: engines, their intake, and when one may load a newer version. Pure.

Invariants:
- only the transitions of `TRANSITIONS` happen; an illegal one raises and changes nothing;
- turns run only on `serving` engines; an engine loads only when it is empty, or is emptied for it (`interrupted`);
- the last engine of a version does not leave it while a live session needs it, until `version_hold_s` has passed;
- a closed engine with a newer version at hand is below `min_util` for at most `drain_max_s`: then it takes a batch
  more, or, beyond the staleness bound, its stragglers leave it. (Not in mode `barrier`, which is there to wait.)

| mode | intake closes for a newer version | an engine loads it |
|---|---|---|
| `drain`, `repack` | after `intake_min_batch` sessions | when it is empty |
| `inflight` | never | at once: its turns pause, and go on under the new version |
| `barrier` | at once | when every engine that has it at hand is empty |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gateway.core.curves import DecodeCurve, KvCeiling
from gateway.core.keeping import KeptVersions
from gateway.core.prefixes import Holding, PrefixIndex
from gateway.core.types import NO_VERSION, EngineName, GroupId, SessionId, TurnId, Version

Mode = Literal["barrier", "drain", "repack", "inflight"]
EngineStatus = Literal["joining", "serving", "refreshing", "fenced", "dead"]

LOAD_TRIES = 2
"""Of one version: a second failure is hardly an accident."""

TRANSITIONS: dict[EngineStatus, frozenset[EngineStatus]] = {
    "joining": frozenset({"serving", "refreshing", "dead"}),  # answers, but may hold no wanted version
    "serving": frozenset({"refreshing", "dead"}),
    "refreshing": frozenset({"serving", "fenced", "dead"}),
    "fenced": frozenset({"refreshing", "dead"}),  # a load failed: it never serves before one succeeds
    "dead": frozenset({"joining"}),
}


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The knobs of intake, refresh and capacity. Times in seconds."""

    mode: Mode = "repack"
    max_running: int = 64  # B: turns of one engine at once
    kv_max: float = 0.9  # C_max: share of an engine's KV tokens that plans and admission may fill
    intake_batch: int = 64  # sessions admitted before the intake closes
    intake_age_s: float = 600.0
    intake_min_batch: int = 1  # sessions admitted before a newer version closes the intake
    version_hold_s: float = 120.0
    drain_max_s: float = 60.0
    min_util: float = 0.25
    staleness_max: int = 4
    strict_sessions_min: int = 1  # strict sessions that wait for a version before it is loaded again,
    strict_tokens_min: int = 16_384  # or tokens of theirs
    pinned_versions_max: int = 4  # kept by relays for sessions that insist on them


@dataclass(slots=True)
class TurnLoad:
    """A turn in flight on an engine; `tokens` grows as they come."""

    turn_id: TurnId
    session_id: SessionId
    tokens: int
    tokens_max: int  # prompt and the most it may still generate
    relayed: bool = False  # as text: it has no session, and ends where it began


@dataclass(slots=True)
class EngineState:
    name: EngineName
    kind: str
    url: str
    status: EngineStatus = "dead"
    version: Version = NO_VERSION
    incarnation: str = ""
    kv_capacity_tokens: int = 0
    context_tokens: int = 0
    kv_usage: float = 0.0  # as the engine reports it, 0..1
    running_reported: int = 0
    waiting_reported: int = 0
    intake_open: bool = False
    intake_opened_at: float = 0.0
    intake_closed_at: float = 0.0
    admitted: int = 0  # sessions of the present intake
    relayed: int = 0  # requests that it was given as text, ever
    below_since: float | None = None  # closed and below `min_util`, with a newer version at hand
    leaving: bool = False  # a plan empties it: nothing more is placed here if another engine will do
    reopened: bool = False  # though a newer version waits: stragglers hold the engine anyway
    turns: dict[TurnId, TurnLoad] = field(default_factory=dict)
    available: Version = NO_VERSION  # newest version that its host's relay holds
    loadable: frozenset[Version] | None = frozenset()  # all that it holds; None: it has not told yet
    loading: Version = NO_VERSION  # while it refreshes
    refresh_not_before: float = 0.0  # a load failed: the next try waits
    load_failures: int = 0  # in a row, of one version
    given_up: Version = NO_VERSION  # failed to load too often: the one before it serves until a newer one is there
    suspected: bool = (
        False  # a connection to it broke: no turn goes there before it has answered as the same incarnation
    )
    must_load: bool = False  # it was met fenced: whatever its label says, its weights may be mixed
    look_error: str = ""  # of the last look at it, if that failed
    load_error: str = ""  # of a load, until a version that is wanted was loaded
    curve: DecodeCurve = field(default_factory=DecodeCurve)
    ceiling: KvCeiling | None = None  # C_max as learnt; made with the first report

    @property
    def tokens(self) -> int:
        """KV tokens of its turns in flight, by the gateway's own count."""
        return sum(turn.tokens for turn in self.turns.values())

    @property
    def last_error(self) -> str:
        """What stands against it now; what no longer does is in the timeline."""
        return self.look_error or self.load_error

    @property
    def holding(self) -> Holding:
        return (self.incarnation, self.version)

    @property
    def newer(self) -> bool:
        """Its host has a version that it should load."""
        return self.available > self.version and self.available != self.given_up

    def load_failed(self, decision: RefreshDecision, error: str, *, by_engine: bool) -> None:
        """After `LOAD_TRIES` of one version the one before it is wanted; if that fails too, the newest once more.

        `by_engine`: it or the snapshot was at fault, not what lies between them.
        """
        self.load_error = error
        if decision.before:
            self.given_up = NO_VERSION
        elif by_engine:
            self.load_failures += 1
            if self.load_failures >= LOAD_TRIES:
                self.load_failures, self.given_up = 0, decision.to_version

    def loaded(self, version: Version) -> None:
        self.version, self.must_load = version, False
        self.load_failures, self.refresh_not_before = 0, 0.0
        if self.given_up == NO_VERSION or version > self.given_up:  # else it serves less than it should
            self.load_error = ""

    def begin_anew(self) -> None:
        """Another incarnation: what failed before may work now."""
        self.load_failures, self.given_up, self.load_error = 0, NO_VERSION, ""

    def to(self, status: EngineStatus) -> None:
        if status not in TRANSITIONS[self.status]:
            raise ValueError(f"engine {self.name}: no way from {self.status} to {status}")
        self.status = status
        if status != "serving":
            self.intake_open = self.suspected = False

    def open_intake(self, now: float) -> None:
        self.intake_open, self.intake_opened_at, self.admitted, self.below_since = True, now, 0, None
        self.reopened = self.newer

    def close_intake(self, now: float) -> None:
        self.intake_open, self.intake_closed_at = False, now


@dataclass(frozen=True, slots=True)
class IntakeChange:
    engine: EngineName
    open: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What waits for a version and takes no other."""

    sessions: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RefreshDecision:
    engine: EngineName
    to_version: Version
    reason: str
    forced_sessions: tuple[SessionId, ...] = ()  # live sessions that lose their version by it
    interrupted: tuple[TurnId, ...] = ()  # turns that must leave, or pause, before it loads
    before: bool = False  # not `to_version`, but the newest before it
    served: bool = False  # until now
    again: bool = False  # an older version, for sessions that insist on it


@dataclass(slots=True)
class FleetState:
    """Every engine, and which version each live session is on."""

    config: FleetConfig
    engines: dict[EngineName, EngineState] = field(default_factory=dict)
    session_versions: dict[SessionId, Version] = field(default_factory=dict)
    group_versions: dict[GroupId, Version] = field(default_factory=dict)
    newest: Version = NO_VERSION  # newest sealed
    insisted: Mapping[Version, Wanted] = field(default_factory=dict)  # by waiting turns that take no other
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    turn_tokens: float = 256.0  # that a turn typically generates, as learnt; before that, a guess
    prefill_tokens_per_s: float = 1000.0
    kept: KeptVersions = field(init=False)

    def __post_init__(self) -> None:
        self.kept = KeptVersions(self.config.pinned_versions_max)

    def gone(self, version: Version) -> bool:
        """No engine could load it: each one's relay has told what it holds, and none has it."""
        if not any(e.available for e in self.engines.values()):
            return False  # engines that have relays may still join
        return all(e.loadable is not None and version not in e.loadable for e in self.engines.values())

    def past(self, version: Version) -> bool:
        """Every engine is on a newer one: none goes back for a session that has yet to begin."""
        return bool(self.engines) and all(e.version > version for e in self.engines.values())

    def sorted_engines(self) -> list[EngineState]:
        return [self.engines[name] for name in sorted(self.engines)]

    def serving(self, version: Version) -> list[EngineState]:
        return [e for e in self.sorted_engines() if e.status == "serving" and e.version == version]

    def live_sessions(self, version: Version) -> tuple[SessionId, ...]:
        return tuple(sorted(s for s, v in self.session_versions.items() if v == version))

    def kv_ceiling(self, engine: EngineState) -> KvCeiling:
        if engine.ceiling is None:
            engine.ceiling = KvCeiling(self.config.kv_max)
        return engine.ceiling

    def wanted(self, engine: EngineState) -> bool:
        """Whether a joining engine may serve with what it holds: the newest there is, or what live sessions are on."""
        if engine.must_load:
            return False
        return engine.version >= engine.available or bool(self.live_sessions(engine.version))

    def unmoved(self, engine: EngineState) -> bool:
        """No intake opens or closes, and no refresh begins, because a turn left it: it takes sessions, and nothing
        newer waits for it. Only a turn that waits for a place may have to know."""
        return (
            engine.status == "serving"
            and engine.intake_open
            and not engine.newer
            and engine.admitted < self.config.intake_batch
        )

    # -- intake

    def intake_changes(self, now: float) -> list[IntakeChange]:
        """Applies and returns what has to open or close now."""
        for engine in self.engines.values():
            self._note_use(engine, now)
        changes = [
            c for engine in self.sorted_engines() if engine.status == "serving" for c in self._intake(engine, now)
        ]
        for change in changes:
            engine = self.engines[change.engine]
            engine.open_intake(now) if change.open else engine.close_intake(now)
        return changes

    def _intake(self, engine: EngineState, now: float) -> Iterable[IntakeChange]:
        c = self.config
        newer = engine.newer
        if c.mode == "inflight":
            if not engine.intake_open:
                yield IntakeChange(engine.name, True, "a newer version interrupts nobody")
        elif engine.intake_open:
            enough = 0 if c.mode == "barrier" else c.intake_min_batch
            if newer and not engine.reopened and engine.admitted >= enough:
                yield IntakeChange(
                    engine.name, False, f"version {engine.available} is here; {engine.admitted} admitted"
                )
            elif newer and not engine.turns:
                yield IntakeChange(engine.name, False, f"version {engine.available} is here and nothing runs")
            elif engine.admitted >= c.intake_batch:
                yield IntakeChange(engine.name, False, f"batch of {c.intake_batch} admitted")
            elif now - engine.intake_opened_at >= c.intake_age_s and engine.admitted:
                yield IntakeChange(engine.name, False, f"open for {c.intake_age_s:g} s")
        elif not newer and len(engine.turns) < c.max_running:
            yield IntakeChange(engine.name, True, f"nothing newer than version {engine.version}")
        elif newer and self._straggling(engine, now) and self._fresh(engine):
            yield IntakeChange(engine.name, True, f"{self._stragglers(engine)}; within the staleness bound")

    def _note_use(self, engine: EngineState, now: float) -> None:
        c = self.config
        closed = engine.status == "serving" and not engine.intake_open and engine.newer
        if not closed or len(engine.turns) >= c.min_util * c.max_running:
            engine.below_since = None
        elif engine.below_since is None:
            engine.below_since = now

    def _straggling(self, engine: EngineState, now: float) -> bool:
        """Kept from its refresh for too long by few turns."""
        since = engine.below_since
        waits = self.config.mode == "barrier"
        return not waits and bool(engine.turns) and since is not None and now - since >= self.config.drain_max_s

    def _fresh(self, engine: EngineState) -> bool:
        """A batch admitted now would still be of use when it is done."""
        return self.newest - engine.version < self.config.staleness_max

    def _stragglers(self, engine: EngineState) -> str:
        held = f"{len(engine.turns)} turns of {engine.tokens} tokens"
        return f"stragglers held it for {self.config.drain_max_s:g} s ({held})"

    # -- refresh

    def refresh_decisions(self, now: float) -> list[RefreshDecision]:
        """Engines that may load now: a version that waiting sessions insist on, else their host's newest.

        Each is marked `refreshing`.
        """
        decisions: list[RefreshDecision] = []
        for version in sorted(self.insisted):
            decision = self._reload(version, now)
            if decision is not None:
                decisions.append(self._decided(decision))
        for engine in self.sorted_engines():
            decision = self._refresh(engine, now)
            if decision is not None:
                decisions.append(self._decided(decision))
        return decisions

    def _decided(self, decision: RefreshDecision) -> RefreshDecision:
        engine = self.engines[decision.engine]
        decision = replace(decision, served=engine.status == "serving")
        engine.to("refreshing")
        engine.loading = decision.to_version
        return decision

    def _reload(self, version: Version, now: float) -> RefreshDecision | None:
        """An older version again, on the engine that is missed least."""
        need, c = self.insisted[version], self.config
        coming = any(e.status == "refreshing" and e.loading == version for e in self.engines.values())
        pays = need.sessions >= c.strict_sessions_min or need.tokens >= c.strict_tokens_min
        if coming or not pays or self.serving(version):
            return None
        free = [
            e
            for e in self.sorted_engines()
            if e.status == "serving" and version in (e.loadable or ()) and not e.turns and now >= e.refresh_not_before
        ]
        free = [e for e in free if not self._held(e, now)]
        if not free:
            return None
        engine = min(free, key=lambda e: (e.intake_open, e.version, e.name))
        reason = f"{need.sessions} sessions with {need.tokens} tokens insist on version {version}"
        return RefreshDecision(engine.name, version, reason, again=True)

    def _held(self, engine: EngineState, now: float) -> bool:
        """Live sessions need its version, nobody else serves it, and that not yet for too long."""
        last = len(self.serving(engine.version)) == 1 and bool(self.live_sessions(engine.version))
        return last and (engine.intake_open or now - engine.intake_closed_at < self.config.version_hold_s)

    def _refresh(self, engine: EngineState, now: float) -> RefreshDecision | None:
        if engine.available == 0 or now < engine.refresh_not_before:
            return None
        if engine.turns:
            return self._interrupting(engine, now)
        if engine.status in ("joining", "fenced"):
            return self._needed(engine)
        if engine.status != "serving" or not engine.newer:
            return None
        if engine.version in self.insisted:
            return None  # who waits for it comes now, or gives up at a deadline
        if self.config.mode == "inflight":
            return RefreshDecision(engine.name, engine.available, "a newer version is here")
        if engine.intake_open or (self.config.mode == "barrier" and self._others_run()):
            return None
        stranded = self.live_sessions(engine.version) if len(self.serving(engine.version)) == 1 else ()
        if not stranded:
            return RefreshDecision(engine.name, engine.available, "empty")
        if now - engine.intake_closed_at < self.config.version_hold_s:
            return None
        reason = f"held version {engine.version} for {self.config.version_hold_s:g} s for {len(stranded)} sessions"
        return RefreshDecision(engine.name, engine.available, reason, stranded)

    def _needed(self, engine: EngineState) -> RefreshDecision | None:
        """What an engine that does not serve has to load first."""
        if engine.available == engine.given_up:
            reason = f"version {engine.given_up} failed {LOAD_TRIES} times: the one before it"
            return RefreshDecision(engine.name, engine.available, reason, before=True)
        if engine.status == "joining" and self.wanted(engine):
            return None
        return RefreshDecision(engine.name, engine.available, f"{engine.status}: needs a wanted version")

    def _interrupting(self, engine: EngineState, now: float) -> RefreshDecision | None:
        """A refresh although turns run: in mode `inflight`, or when stragglers have no other end."""
        if engine.status != "serving" or not engine.newer:
            return None
        turns = tuple(sorted(engine.turns))
        if self.config.mode == "inflight":
            return RefreshDecision(engine.name, engine.available, "a newer version is here", (), turns)
        if engine.intake_open or not self._straggling(engine, now) or self._fresh(engine):
            return None
        alone = len(self.serving(engine.version)) == 1
        stranded = self.live_sessions(engine.version) if alone else ()
        reason = f"{self._stragglers(engine)}; beyond the staleness bound"
        return RefreshDecision(engine.name, engine.available, reason, stranded, turns)

    def _others_run(self) -> bool:
        """Whether anybody at the barrier still runs a turn or takes sessions."""
        at_it = [e for e in self.engines.values() if e.status == "serving" and e.newer]
        return any(e.turns or e.intake_open for e in at_it)


def staleness_histogram(versions: Iterable[Version], newest: Version) -> Mapping[int, int]:
    """How many of `versions` lie how far behind `newest`."""
    counts: dict[int, int] = {}
    for version in versions:
        counts[max(0, newest - version)] = counts.get(max(0, newest - version), 0) + 1
    return dict(sorted(counts.items()))
