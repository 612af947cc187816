"""The state of the fleet: its engines, and which version each live session is on. Read by all, written by `machine`.

Invariants:
- only the transitions of `WAYS` happen; an illegal one raises and changes nothing;
- an intake is open on a `serving` engine alone;
- engines that serve are ordered by load (`order`). What their positions depend on is changed by methods alone, which
  note the engine in `_displaced`: its position is computed anew before the order is next read.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Literal, get_args

from gateway.core.faults import Faults
from gateway.core.fleet.config import FleetConfig
from gateway.core.fleet.curves import SECONDS_PER_TOKEN, DecodeCurve, KvCeiling
from gateway.core.fleet.order import Load, LoadOrder, Pool
from gateway.core.fleet.pinned import PinnedVersions
from gateway.core.fleet.prefixes import Holding, PrefixIndex
from gateway.core.groups import GroupVersions
from gateway.core.types import NO_VERSION, EngineName, SessionId, TurnId, Version, VersionPolicy

EngineStatus = Literal["joining", "serving", "refreshing", "fenced", "dead"]

WAYS: Mapping[tuple[EngineStatus, EngineStatus], str] = {
    ("dead", "joining"): "it responds, and reports what it holds",
    ("joining", "serving"): "it holds a wanted version: its host's newest, or one that live sessions are on",
    ("joining", "refreshing"): "it holds no wanted version, or joined fenced",
    ("joining", "dead"): "it does not respond any more",
    ("serving", "refreshing"): "it is empty, or is emptied, and its host has another version for it",
    ("serving", "dead"): "it does not respond any more, was restarted, or has another label than what was loaded",
    ("refreshing", "serving"): "it has loaded; or it goes on with what it had, which the load did not touch",
    ("refreshing", "fenced"): "its load failed after the fence: it may hold half a version",
    ("refreshing", "dead"): "it does not respond any more",
    ("fenced", "refreshing"): "its load is tried again",
    ("fenced", "dead"): "it does not respond any more, or was restarted",
}
"""The transitions of an engine, and why each happens."""
TRANSITIONS: Mapping[EngineStatus, frozenset[EngineStatus]] = {
    status: frozenset(after for before, after in WAYS if before == status) for status in get_args(EngineStatus)
}
Displaced = dict[EngineName, bool]
"""Engines whose position in the order is to be computed anew. True: turns came or went, so that its tokens have to be
counted again; to count those of all engines whose intake closes at once took longer than to close them."""
BAD_MAX = 64
"""Versions given up that an engine remembers: more than relays hold."""


FACTS = ("prompt_tokens", "tokens_max", "expected_tokens", "moves", "ends_session", "in_place", "relayed")
"""What is packed into `TurnLoad.facts`, each as an int64."""
_pack = struct.Struct(f"{len(FACTS)}q").pack


@dataclass(slots=True)
class TurnLoad:
    """A turn in flight on an engine. `tokens` grows as they come; nothing else changes.

    `facts` is what the planner reads of thousands of turns at once: one copy of each, and no attribute.
    """

    turn_id: TurnId
    session_id: SessionId
    tokens: int
    tokens_max: int  # prompt and the most it may still generate
    relayed: bool = False  # forwarded as text: it has no session, and ends where it began
    generated: InitVar[int] = 0  # of `tokens`, when it came to the engine
    expected_tokens: int = 0  # of its whole answer, as its client thinks; 0: not named
    moves: int = 0  # of its session, when it came to the engine
    ends_session: bool = False  # a call without session: its KV goes with it
    in_place: bool = False  # it has to end where it began
    facts: bytes = field(init=False, repr=False)

    def __post_init__(self, generated: int) -> None:
        prompt_tokens = self.tokens - generated
        self.facts = _pack(
            prompt_tokens,
            self.tokens_max,
            self.expected_tokens,
            self.moves,
            self.ends_session,
            self.in_place,
            self.relayed,
        )


@dataclass(slots=True)
class EngineState:
    name: EngineName
    kind: str
    url: str
    relay: str = ""  # beside it; none: it loads nothing
    loads: bool = True  # its kind takes published versions; one that does not has no relay, and keeps its version
    displaced: Displaced = field(default_factory=dict, init=False, repr=False, compare=False)  # the fleet's
    status: EngineStatus = "dead"
    version: Version = NO_VERSION
    incarnation: str = ""
    started_with: str = ""  # its label of the weights that it was started with, where it named them
    dtype: str = ""  # what it computes in; empty: not reported
    kv_capacity_tokens: int = 0
    context_tokens: int = 0
    kv_usage: float = 0.0  # as the engine reports it, 0..1
    running_reported: int = 0
    waiting_reported: int = 0
    intake_open: bool = False
    intake_opened_at: float = 0.0
    intake_closed_at: float = 0.0
    admitted: int = 0  # sessions of the present intake
    below_since: float | None = None  # closed and below `min_util`, with a newer version at hand
    held_since: float | None = None  # it stays for sessions that no other engine could serve (`hold`)
    held_before_s: float = 0.0  # the same, before the last turn of one of them
    held_noted: bool = False  # its present hold is on the timeline
    leaving: bool = False  # a plan empties it: nothing more is placed here if another engine will do
    reopened: bool = False  # though a newer version waits: stragglers hold the engine anyway
    turns: dict[TurnId, TurnLoad] = field(default_factory=dict)  # changed by `enter` and `leave` alone
    available: Version = NO_VERSION  # newest version that its host's relay holds
    loadable: frozenset[Version] | None = frozenset()  # all that it holds; None: not reported yet
    loading: Version = NO_VERSION  # while it refreshes
    refresh_not_before: float = 0.0  # a load failed: the next try waits
    load_failures: int = 0  # in a row, of one version, by fault of the engine or the snapshot
    refresh_failures: int = 0  # in a row, of one version, by whatever fault
    tried: Version = NO_VERSION  # the newest at its host when its last load failed: a newer one waits for nothing
    good: Version = NO_VERSION  # the newest that it has held whole: to go back to, and kept by its relay for that
    bad: frozenset[Version] = frozenset()  # given up by this incarnation, the newest `BAD_MAX`
    given_up: Version = NO_VERSION  # failed to load too often: the one before it serves until a newer one is there
    suspected: bool = False  # no turn goes there before it has answered as the same incarnation
    suspected_at: float = 0.0
    status_since: float = 0.0
    suspicion: str = ""  # why it stays suspected for longer than until its next answer
    ready: bool = True  # False: it says that it takes no turns, and sessions on its version may have to go elsewhere
    faults: Faults = field(default_factory=Faults)
    seeds: bool = True  # it samples by a request's `seed`; False: it ignores that
    must_load: bool = False  # it joined fenced: whatever its label, its weights may be mixed
    failed_polls: int = 0  # in a row
    poll_error: str = ""  # of the last poll, if that failed
    load_error: str = ""  # of a load, until a version that is wanted was loaded
    curve: DecodeCurve = field(default_factory=DecodeCurve)
    ceiling: KvCeiling | None = None  # C_max as learnt; made with the first report

    def _moves(self) -> None:
        """Its position in the order has to be computed anew."""
        self.displaced.setdefault(self.name, False)

    def enter(self, load: TurnLoad) -> None:
        """The turn runs here from now on."""
        self.turns[load.turn_id] = load
        self.displaced[self.name] = True

    def admit(self, sessions: int) -> None:
        """So many more sessions of the present intake."""
        self.admitted += sessions
        self._moves()

    def leave(self, turn_id: TurnId) -> bool:
        """The turn has left; False: it did not run here."""
        self.displaced[self.name] = True
        return self.turns.pop(turn_id, None) is not None

    @property
    def tokens(self) -> int:
        """KV tokens of its turns in flight, by the gateway's own count."""
        return sum([turn.tokens for turn in self.turns.values()])

    @property
    def load(self) -> Load:
        return Load(len(self.turns), self.tokens, self.admitted, self.name)

    def within(self, pool: Pool) -> bool:
        serves = self.status == "serving" and self.ready
        return serves and self.version == pool.version and (self.intake_open or not pool.opened)

    @property
    def pools(self) -> Sequence[Pool]:
        if self.status != "serving" or not self.ready:
            return ()
        return (Pool(self.version), Pool(self.version, True)) if self.intake_open else (Pool(self.version),)

    @property
    def takes_turns(self) -> bool:
        """It serves, and nothing keeps it from that for longer than until its next answer."""
        return self.status == "serving" and not self.suspicion

    @property
    def last_error(self) -> str:
        """What keeps the engine from serving now; past errors are on the timeline."""
        return self.poll_error or self.suspicion or self.load_error

    @property
    def failing(self) -> str:
        """It takes turns again after turn after turn failed on it, and none has ended well since."""
        if not (self.faults.why and self.takes_turns):
            return ""
        return f"takes turns, and none has ended well since turn after turn failed on it; the last: {self.faults.why}"

    @property
    def holding(self) -> Holding:
        return (self.incarnation, self.version)

    @property
    def newer(self) -> bool:
        """Its host has a version that it should load."""
        return self.available > self.version and self.available != self.given_up

    def unlike(self, incarnation: str) -> bool:
        """Whether an engine that responds as `incarnation` has to describe itself before it may serve on."""
        return self.status == "dead" or self.incarnation != incarnation or self.must_load or self.suspected

    def joined(self, incarnation: str, version: Version, *, must_load: bool) -> None:
        self.incarnation, self.version, self.must_load = incarnation, version, must_load
        if not must_load:
            self.good = max(self.good, version)
        self._moves()

    def loaded(self, version: Version) -> None:
        self.version, self.must_load, self.refresh_failures = version, False, 0
        self._moves()
        self.good = max(self.good, version)
        self.load_failures, self.refresh_not_before = 0, 0.0
        self.faults = Faults()
        if self.given_up == NO_VERSION or version > self.given_up:  # else it serves less than it should
            self.load_error = ""

    def suspect(self, now: float, why: str = "") -> None:
        """It gets no turn before a response to a later request; with a reason: before that is over, too."""
        self.suspected, self.suspected_at, self.suspicion = True, now, why or self.suspicion

    def trust(self) -> None:
        self.suspected, self.suspicion = False, ""
        self.note_ready(True)

    def note_ready(self, ready: bool) -> None:
        self.ready = ready
        self._moves()

    def begin_anew(self) -> None:
        """Another incarnation: what failed before may work now."""
        self.load_failures, self.given_up, self.load_error = 0, NO_VERSION, ""
        self.tried, self.bad, self.faults = NO_VERSION, frozenset(), Faults()

    def give_up(self, version: Version) -> None:
        """The version does not load here; the one before it serves until a newer one is there."""
        self.load_failures, self.given_up = 0, version
        self.bad = frozenset(sorted({*self.bad, version})[-BAD_MAX:])

    def before(self, version: Version, held: Iterable[int]) -> Version | None:
        """The version to fall back to, of those that its relay holds: the newest that it has held, else the newest
        that it has not given up."""
        older = {Version(v) for v in held if v < version}
        return self.good if self.good in older else max(older - self.bad or older, default=None)

    def to(self, status: EngineStatus) -> None:
        if status not in TRANSITIONS[self.status]:
            raise ValueError(f"engine {self.name}: no way from {self.status} to {status}")
        self.status = status
        self._moves()
        if status != "serving":
            self.intake_open = False
            self.trust()
        if status == "dead":  # what it reported last is not so any more
            self.kv_usage, self.running_reported, self.waiting_reported, self.admitted = 0.0, 0, 0, 0

    def open_intake(self, now: float) -> None:
        self.intake_open, self.intake_opened_at, self.admitted, self.below_since = True, now, 0, None
        self.reopened = self.newer
        self._moves()

    def close_intake(self, now: float) -> None:
        self.intake_open, self.intake_closed_at = False, now
        self._moves()

    def note_use(self, now: float, *, below: bool) -> None:
        """`below`: see `below_since`."""
        if below != (self.below_since is not None):
            self.below_since = now if below else None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Sessions that wait for one version and accept no other."""

    sessions: int
    tokens: int


@dataclass(slots=True)
class FleetState:
    """Every engine, and which version each live session is on."""

    config: FleetConfig
    engines: dict[EngineName, EngineState] = field(default_factory=dict)
    session_versions: dict[SessionId, Version] = field(default_factory=dict)
    policies: dict[SessionId, VersionPolicy] = field(default_factory=dict)  # of those, where it is not `segment`
    waiting_since: Sequence[float] = ()  # when turns began to wait that an engine with room would take
    group_versions: GroupVersions = field(default_factory=GroupVersions)
    newest: Version = NO_VERSION  # newest sealed
    insisted: Mapping[Version, Wanted] = field(default_factory=dict)  # by waiting turns that take no other
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    token_s: float = SECONDS_PER_TOKEN  # of one turn, on the mean of all engines, as learnt
    turn_tokens: float = 256.0  # that a turn typically generates, as learnt; before that, a guess
    prefill_tokens_per_s: float = 1000.0
    pinned: PinnedVersions = field(init=False)
    training: set[SessionId] = field(default_factory=set, init=False)  # live, for training, and begun
    beside: dict[str, set[EngineName]] = field(default_factory=dict, init=False)  # by relay
    held: set[EngineName] = field(default_factory=set, init=False)  # by live sessions, by the last round
    _on: dict[Version, set[SessionId]] = field(default_factory=dict, init=False)  # `session_versions`, by version
    _order: LoadOrder = field(default_factory=LoadOrder, init=False)
    _displaced: Displaced = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.pinned = PinnedVersions(self.config.pinned_versions_max)
        for engine in self.engines.values():
            self.add(engine)

    def add(self, engine: EngineState) -> None:
        self.engines[engine.name], engine.displaced = engine, self._displaced
        self._displaced[engine.name] = True
        self.beside.setdefault(engine.relay, set()).add(engine.name)

    def remove(self, name: EngineName) -> None:
        engine = self.engines.pop(name)
        engine.displaced = {}
        self.held.discard(name)
        self._order.put(Load(0, 0, 0, name), ())
        self.beside[engine.relay].discard(name)
        if not self.beside[engine.relay]:
            del self.beside[engine.relay]

    def note_session(self, session_id: SessionId, version: Version, policy: VersionPolicy) -> None:
        """A live session is on `version`, and will have turns there."""
        self.forget_session(session_id)
        self.session_versions[session_id] = version
        self._on.setdefault(version, set()).add(session_id)
        if policy != "segment":
            self.policies[session_id] = policy

    def forget_session(self, session_id: SessionId) -> None:
        """The session has ended."""
        version = self.session_versions.pop(session_id, None)
        self.policies.pop(session_id, None)
        if version is not None:
            self._on[version].discard(session_id)
            if not self._on[version]:
                del self._on[version]

    def fallbacks(self) -> dict[str, Version]:
        """By relay: the newest version that an engine beside it has held whole, until one of them holds a newer one."""
        found: dict[str, Version] = {}
        for engine in self.engines.values():
            if engine.relay and engine.good:
                found[engine.relay] = max(engine.good, found.get(engine.relay, NO_VERSION))
        return found

    def gone(self, version: Version) -> bool:
        """No engine could load the version: each one's relay has reported what it holds, and none holds it."""
        if not any(e.available for e in self.engines.values()):
            return False  # engines that have relays may still join
        return all(e.loadable is not None and version not in e.loadable for e in self.engines.values())

    def past(self, newest: Version, oldest: Version = NO_VERSION) -> bool:
        """No engine will be on a version from `oldest` to `newest` for a session that has yet to begin: none goes back
        for it, and one that serves an older version and loads none stays there."""
        return bool(self.engines) and all(
            e.version > newest or (e.version < oldest and not e.loads and e.status == "serving")
            for e in self.engines.values()
        )

    def sorted_engines(self) -> list[EngineState]:
        return [self.engines[name] for name in sorted(self.engines)]

    # -- engines that serve

    def _ordered(self) -> LoadOrder:
        """The order, with the position of every displaced engine computed anew."""
        for name, recount in self._displaced.items():
            engine = self.engines.get(name)
            if engine is not None:
                kept = None if recount else self._order.kept(name)
                load = engine.load if kept is None else Load(kept.turns, kept.tokens, engine.admitted, name)
                self._order.put(load, engine.pools, self._free(engine, load))
        self._displaced.clear()
        return self._order

    def served(self, *, opened: bool = False) -> list[Version]:
        """Versions that engines serve, or take new sessions for; the newest first."""
        return [pool.version for pool in self._ordered().pools() if pool.opened == opened]

    def num_serving(self, pool: Pool) -> int:
        return len(self._ordered().loads(pool))

    def serving(self, pool: Pool) -> Iterator[EngineState]:
        """The engines of a pool, in no particular order."""
        return (self.engines[load.name] for load in self._ordered().loads(pool))

    def least_loaded(self, pool: Pool, prompt_tokens: int, suits: Callable[[EngineState], bool]) -> EngineState | None:
        """The least loaded engine of a pool that has room for so long a prompt and `suits`."""
        order, at, most = self._ordered(), 0, 0.0
        if prompt_tokens > order.free.get(pool, 0.0):
            return None
        while at < len(loads := order.loads(pool)) and (kept := loads[at]).turns < self.config.max_running:
            engine = self.engines[kept.name]
            free = self._free(engine, kept)
            if engine.suspected or prompt_tokens > free or not suits(engine):
                at, most = at + 1, max(most, free)  # nor has it room with what came since
            elif (load := engine.load) != kept:
                order.put(load, engine.pools, self._free(engine, load))
            else:
                return engine
        order.free[pool] = most
        return None

    def _free(self, engine: EngineState, load: Load) -> float:
        """KV tokens that it has left, with such a load. Without a turn it takes any prompt."""
        if not load.turns or not engine.kv_capacity_tokens:
            return math.inf
        return self.config.kv_max * engine.kv_capacity_tokens - load.tokens

    def has_room(self, engine: EngineState, prompt_tokens: int) -> bool:
        if engine.status != "serving" or engine.suspected or len(engine.turns) >= self.config.max_running:
            return False
        return prompt_tokens <= self._free(engine, engine.load)

    def needed(self, version: Version) -> bool:
        """Live sessions are on it."""
        return version in self._on

    def num_sessions(self) -> Mapping[Version, int]:
        """Live sessions, by the version that they are on."""
        return {version: len(sessions) for version, sessions in self._on.items()}

    def live_sessions(self, version: Version) -> tuple[SessionId, ...]:
        return tuple(sorted(self._on.get(version, ())))

    def kv_max(self, engine: EngineState) -> float:
        """C_max of the engine, as learnt."""
        return self.config.kv_max if engine.ceiling is None else engine.ceiling.value

    def wanted(self, engine: EngineState) -> bool:
        """Whether a joining engine may serve with what it holds: the newest there is, or what live sessions are on."""
        if engine.must_load:
            return False
        return engine.version >= engine.available or self.needed(engine.version)

    def unmoved(self, engine: EngineState) -> bool:
        """No intake opens or closes, and no refresh begins, because a turn left it: it takes sessions, and nothing
        newer waits for it. Only a turn that waits for a place may have to know."""
        return (
            engine.status == "serving"
            and engine.intake_open
            and not engine.newer
            and engine.admitted < self.config.intake_batch
        )


def staleness_histogram(versions: Iterable[Version] | Mapping[Version, int], newest: Version) -> Mapping[int, int]:
    """How many of `versions`, or of so many of each, lie how far behind `newest`."""
    counts = Counter[int]()
    for version, num in Counter(versions).items():
        counts[max(0, newest - version)] += num
    return dict(sorted(counts.items()))
